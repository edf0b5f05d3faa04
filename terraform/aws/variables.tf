variable "name" {
  description = "Name of the bucket, with which the names of policies, roles and instance profiles begin."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,54}[a-z0-9]$", var.name))
    error_message = "Use 3 to 56 lower-case letters, digits and hyphens."
  }
}

variable "kms_key_arn" {
  description = "ARN of the KMS key that encrypts the bucket; null for keys that S3 manages."
  type        = string
  default     = null
}

variable "object_options" {
  description = "Options of cloudckpt.S3Options in use that need more permissions: \"acl\", \"tags\"."
  type        = set(string)
  default     = []

  validation {
    condition     = length(setsubtract(var.object_options, ["acl", "tags"])) == 0
    error_message = "Only \"acl\" and \"tags\" are known."
  }
}

variable "abort_uploads_after_days" {
  description = "Days after which a multipart upload that a killed process left open is aborted."
  type        = number
  default     = 2

  validation {
    condition     = var.abort_uploads_after_days >= 1 && floor(var.abort_uploads_after_days) == var.abort_uploads_after_days
    error_message = "Use a whole number of days, at least 1."
  }
}

variable "keep_noncurrent_days" {
  description = "Days for which replaced and deleted objects can be restored, and are billed; 0 for no versioning. What versioning has left expires a day after it is turned off."
  type        = number
  default     = 0

  validation {
    condition     = var.keep_noncurrent_days >= 0 && floor(var.keep_noncurrent_days) == var.keep_noncurrent_days
    error_message = "Use a whole number of days, or 0."
  }
}

variable "expiration" {
  description = "Deletes each object under a prefix once it is some days old; null to keep everything. S3 does not know which objects are one checkpoint: for about a day its data may be gone while its .metadata is there, and it can't be loaded."
  type = object({
    prefix = string
    days   = number
  })
  default = null

  validation {
    condition     = var.expiration == null ? true : endswith(var.expiration.prefix, "/") && var.expiration.days >= 1
    error_message = "The prefix must end in a slash, and days be at least 1."
  }
}

variable "service_accounts" {
  description = "Kubernetes service accounts, each as \"namespace/name\", that may assume the roles."
  type = object({
    reader = optional(set(string), [])
    writer = optional(set(string), [])
  })
  default = {}

  validation {
    condition     = alltrue([for account in setunion(var.service_accounts.reader, var.service_accounts.writer) : can(regex("^[a-z0-9-]+/[a-z0-9.-]+$", account))])
    error_message = "Write each service account as \"namespace/name\"."
  }

  validation {
    condition     = length(setunion(var.service_accounts.reader, var.service_accounts.writer)) == 0 || var.eks_cluster != null || var.oidc_provider_arn != null
    error_message = "Service accounts need eks_cluster (EKS Pod Identity) or oidc_provider_arn (IRSA)."
  }
}

variable "eks_cluster" {
  description = "EKS cluster with the Pod Identity agent, whose service accounts get the roles; null for none. An object, so that its name may be that of a cluster of the same plan."
  type        = object({ name = string })
  default     = null
}

variable "oidc_provider_arn" {
  description = "ARN of the IAM OIDC provider of the EKS cluster, for IAM roles for service accounts; null for none."
  type        = string
  default     = null
}

variable "instance_profiles" {
  description = "Whether to make instance profiles, so that EC2 instances can have the roles."
  type        = bool
  default     = false
}

variable "tags" {
  description = "Tags of all resources."
  type        = map(string)
  default     = {}
}

variable "inspect" {
  description = "Whether the roles may also read the lifecycle and the versioning of the bucket, so that a job can check them."
  type        = bool
  default     = false
}

variable "append_only" {
  description = "Whether writers may delete nothing. What failed saves and replaced checkpoints leave behind then stays, and cloudckpt logs it."
  type        = bool
  default     = false
}

variable "gateway_endpoint" {
  description = "VPC from which S3 is reached by a gateway endpoint, which costs nothing, instead of through a NAT gateway, which bills each byte; null for none."
  type = object({
    vpc_id          = string
    route_table_ids = list(string)
  })
  default = null
}

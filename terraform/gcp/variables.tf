variable "project_id" {
  description = "Project of the bucket and of the custom roles."
  type        = string
}

variable "name" {
  description = "Name of the bucket, with which the ids of the custom roles begin."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9_-]{1,54}[a-z0-9]$", var.name))
    error_message = "Use 3 to 56 lower-case letters, digits, hyphens and underscores."
  }
}

variable "location" {
  description = "Location of the bucket: best the region of the accelerators."
  type        = string
}

variable "kms_key" {
  description = "Id of the Cloud KMS key that encrypts the bucket; null for keys that Google manages. The module lets Cloud Storage use it."
  type = object({
    id = string
  })
  default = null
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

variable "soft_delete_days" {
  description = "Days for which Cloud Storage keeps what was deleted or replaced, versioning or not: 0 or 7 to 90. Soft-deleted objects are billed like others, which adds up where checkpoints are replaced often."
  type        = number
  default     = 0

  validation {
    condition     = var.soft_delete_days == 0 || (var.soft_delete_days >= 7 && var.soft_delete_days <= 90)
    error_message = "Use 0, or 7 to 90 days."
  }
}

variable "expiration" {
  description = "Deletes checkpoints under a prefix once they are some days old, their data and all else two days later; null to keep everything."
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
  description = "Kubernetes service accounts, each as \"namespace/name\", that get the roles by Workload Identity Federation for GKE."
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
    condition     = length(setunion(var.service_accounts.reader, var.service_accounts.writer)) == 0 || var.gke_project != null
    error_message = "Service accounts need gke_project, whose workload identity pool they belong to."
  }
}

variable "gke_project" {
  description = "Id and number of the project of the GKE clusters; null without service_accounts."
  type = object({
    id     = string
    number = string
  })
  default = null
}

variable "members" {
  description = "Other IAM members that get the roles, such as \"serviceAccount:...\" of Compute Engine instances."
  type = object({
    reader = optional(set(string), [])
    writer = optional(set(string), [])
  })
  default = {}

  validation {
    condition     = length(setintersection(setunion(var.members.reader, var.members.writer), ["allUsers", "allAuthenticatedUsers"])) == 0
    error_message = "Checkpoints are not for the public."
  }
}

variable "labels" {
  description = "Labels of the bucket."
  type        = map(string)
  default     = {}
}

variable "inspect" {
  description = "Whether the roles may also read the settings of the bucket, so that a job can check them."
  type        = bool
  default     = false
}

variable "append_only" {
  description = "Whether writers may delete nothing. Google asks for the same permission of whoever replaces an object: each checkpoint then needs a location of its own."
  type        = bool
  default     = false
}

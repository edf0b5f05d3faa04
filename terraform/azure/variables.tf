variable "resource_group" {
  description = "Resource group of everything: an azurerm_resource_group, or its id, name and location."
  type = object({
    id       = string
    name     = string
    location = string
  })
}

variable "storage_account_name" {
  description = "Name of the storage account, unique in all of Azure."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9]{3,24}$", var.storage_account_name))
    error_message = "Use 3 to 24 lower-case letters and digits."
  }
}

variable "container_name" {
  description = "Name of the container."
  type        = string
  default     = "checkpoints"
}

variable "replication_type" {
  description = "Replication of the storage account, such as LRS or ZRS."
  type        = string
  default     = "ZRS"
}

variable "customer_managed_key" {
  description = "Key Vault key that encrypts the account, and the user-assigned identity that may use it (Key Vault Crypto Service Encryption User); null for keys that Microsoft manages."
  type = object({
    key_vault_key_id          = string
    user_assigned_identity_id = string
  })
  default = null
}

variable "object_options" {
  description = "Options of cloudckpt.AzureOptions in use that need more permissions: \"tags\"."
  type        = set(string)
  default     = []

  validation {
    condition     = length(setsubtract(var.object_options, ["tags"])) == 0
    error_message = "Only \"tags\" is known."
  }
}

variable "keep_noncurrent_days" {
  description = "Age in days, since it was written, at which a version that is not the current one is deleted; 0 for no versioning. What was older than that when it was replaced or deleted can be restored for about a day only: soft_delete_days counts from the deletion. What versioning has left expires after it is turned off."
  type        = number
  default     = 0

  validation {
    condition     = var.keep_noncurrent_days >= 0 && floor(var.keep_noncurrent_days) == var.keep_noncurrent_days
    error_message = "Use a whole number of days, or 0."
  }
}

variable "soft_delete_days" {
  description = "Days for which Azure keeps what was deleted or replaced: 0 to 365. Soft-deleted blobs are billed like others, which adds up where checkpoints are replaced often."
  type        = number
  default     = 0

  validation {
    condition     = var.soft_delete_days >= 0 && var.soft_delete_days <= 365
    error_message = "Use 0 to 365 days."
  }
}

variable "expiration" {
  description = "Deletes each blob under a prefix of the container once it is some days old; null to keep everything. Azure does not know which blobs are one checkpoint: for about a day its data may be gone while its .metadata is there, and it can't be loaded."
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
  description = "Kubernetes service accounts, each as \"namespace/name\", that get the identities by AKS workload identity."
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
    condition     = length(setunion(var.service_accounts.reader, var.service_accounts.writer)) == 0 || var.aks_oidc_issuer_url != null
    error_message = "Service accounts need aks_oidc_issuer_url."
  }
}

variable "aks_oidc_issuer_url" {
  description = "OIDC issuer URL of the AKS cluster; null without service_accounts."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of the storage account and the identities."
  type        = map(string)
  default     = {}
}

variable "inspect" {
  description = "Whether the roles may also read the lifecycle policy and the settings of the blob service, so that a job can check them."
  type        = bool
  default     = false
}

variable "append_only" {
  description = "Whether writers may delete nothing. What failed saves and replaced checkpoints leave behind then stays, and cloudckpt logs it."
  type        = bool
  default     = false
}

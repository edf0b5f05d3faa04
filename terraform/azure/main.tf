resource "azurerm_storage_account" "checkpoints" {
  #checkov:skip=CKV_AZURE_33:no queue is used
  #checkov:skip=CKV_AZURE_59:clusters may reach the account from anywhere, but not anonymously; restrict the network outside
  #checkov:skip=CKV_AZURE_206:checkpoints are made again by the job, replicas in another region cost more than that
  #checkov:skip=CKV2_AZURE_33:a private endpoint belongs to the cluster's network; attach it outside
  name                     = var.storage_account_name
  resource_group_name      = var.resource_group.name
  location                 = var.resource_group.location
  account_kind             = "StorageV2"
  account_tier             = "Standard"
  account_replication_type = var.replication_type
  tags                     = var.tags

  https_traffic_only_enabled       = true
  min_tls_version                  = "TLS1_2"
  allow_nested_items_to_be_public  = false
  shared_access_key_enabled        = false
  default_to_oauth_authentication  = true
  cross_tenant_replication_enabled = false
  local_user_enabled               = false

  blob_properties {
    versioning_enabled = var.keep_noncurrent_days > 0

    dynamic "delete_retention_policy" {
      for_each = var.soft_delete_days > 0 ? [var.soft_delete_days] : []

      content {
        days = delete_retention_policy.value
      }
    }
  }

  dynamic "identity" {
    for_each = var.customer_managed_key[*]

    content {
      type         = "UserAssigned"
      identity_ids = [identity.value.user_assigned_identity_id]
    }
  }

  dynamic "customer_managed_key" {
    for_each = var.customer_managed_key[*]

    content {
      key_vault_key_id          = customer_managed_key.value.key_vault_key_id
      user_assigned_identity_id = customer_managed_key.value.user_assigned_identity_id
    }
  }
}

resource "azurerm_storage_container" "checkpoints" {
  #checkov:skip=CKV2_AZURE_21:a training job reads and writes too much for access logs by default; attach them outside
  name                  = var.container_name
  storage_account_id    = azurerm_storage_account.checkpoints.id
  container_access_type = "private"
}

# No rule for the uploads of killed processes: Azure discards blocks that were not committed for 7 days by itself.
resource "azurerm_storage_management_policy" "checkpoints" {
  storage_account_id = azurerm_storage_account.checkpoints.id

  # also without versioning: what it has left, if it was on before, would stay and be billed for ever
  rule {
    name    = "expire-noncurrent"
    enabled = true

    filters {
      blob_types   = ["blockBlob"]
      prefix_match = ["${azurerm_storage_container.checkpoints.name}/"]
    }

    actions {
      version {
        delete_after_days_since_creation = max(var.keep_noncurrent_days, 1)
      }
    }
  }

  # by the age of each blob, since filters know prefixes and tags: see README.md
  dynamic "rule" {
    for_each = var.expiration[*]

    content {
      name    = "expire-checkpoints"
      enabled = true

      filters {
        blob_types   = ["blockBlob"]
        prefix_match = ["${azurerm_storage_container.checkpoints.name}/${rule.value.prefix}"]
      }

      actions {
        base_blob {
          delete_after_days_since_modification_greater_than = rule.value.days
        }
      }
    }
  }
}

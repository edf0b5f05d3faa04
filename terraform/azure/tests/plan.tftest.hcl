mock_provider "azurerm" {}

variables {
  resource_group = {
    id       = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/training"
    name     = "training"
    location = "westeurope"
  }
  storage_account_name = "examplecheckpoints"
}

run "private_by_default" {
  command = plan

  assert {
    condition     = !azurerm_storage_account.checkpoints.allow_nested_items_to_be_public && !azurerm_storage_account.checkpoints.shared_access_key_enabled && azurerm_storage_account.checkpoints.https_traffic_only_enabled
    error_message = "The account is open to the public, to keys, or without TLS."
  }

  assert {
    condition     = alltrue([for action in local.data_actions["reader"] : endswith(action, "/read")])
    error_message = "A reader may do more than read."
  }

  assert {
    condition     = length(azurerm_role_assignment.inspect) == 0
    error_message = "Somebody may read settings unasked."
  }
}

run "append_only" {
  command = plan

  variables {
    append_only = true
  }

  assert {
    condition     = !anytrue([for action in local.data_actions["writer"] : endswith(action, "/delete")])
    error_message = "A writer may delete blobs."
  }
}

output "uri" {
  description = "What the locations of checkpoints begin with."
  value       = "az://${azurerm_storage_container.checkpoints.name}"
}

output "environment" {
  description = "Environment variables to set where cloudckpt runs."
  value       = { AZURE_STORAGE_ACCOUNT = azurerm_storage_account.checkpoints.name }
}

output "storage_account_id" {
  description = "Id of the storage account, for network rules, private endpoints and diagnostic settings."
  value       = azurerm_storage_account.checkpoints.id
}

output "client_ids" {
  description = "Client ids of the identities \"reader\" and \"writer\". AKS wants it as the service account's annotation azure.workload.identity/client-id."
  value       = { for role, identity in azurerm_user_assigned_identity.this : role => identity.client_id }
}

output "identity_ids" {
  description = "Resource ids of the identities \"reader\" and \"writer\", to assign to virtual machines."
  value       = { for role, identity in azurerm_user_assigned_identity.this : role => identity.id }
}

output "role_definition_ids" {
  description = "Ids of the role definitions \"reader\" and \"writer\", to assign to other principals on the container."
  value       = { for role, definition in azurerm_role_definition.this : role => definition.role_definition_resource_id }
}

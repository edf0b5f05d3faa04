locals {
  permissions = jsondecode(file("${path.module}/permissions.json"))
  roles       = toset(["reader", "writer"])

  data_actions = { for role in local.roles : role => [
    for action in distinct(flatten([
      values(local.permissions[role]),
      [for option in var.object_options : values(local.permissions.options[option][role])],
    ])) : action if !(var.append_only && endswith(action, "/delete"))
  ] }

  federated = { for pair in flatten([for role in local.roles : [for account in var.service_accounts[role] : { role = role, account = account }]]) :
    "${pair.role}_${replace(pair.account, "/[/.]/", "_")}" => pair
  }
}

# The built-in roles also read, make and delete containers, and issue delegation keys.
resource "azurerm_role_definition" "this" {
  for_each = local.roles

  name              = "cloudckpt ${each.key} of ${var.storage_account_name}/${var.container_name}"
  description       = "What cloudckpt needs as a ${each.key} of checkpoints."
  scope             = var.resource_group.id
  assignable_scopes = [var.resource_group.id]

  permissions {
    data_actions = local.data_actions[each.key]
  }
}

resource "azurerm_user_assigned_identity" "this" {
  for_each = local.roles

  name                = "${var.storage_account_name}-${var.container_name}-${each.key}"
  resource_group_name = var.resource_group.name
  location            = var.resource_group.location
  tags                = var.tags
}

resource "azurerm_role_assignment" "this" {
  for_each = local.roles

  scope              = azurerm_storage_container.checkpoints.id
  role_definition_id = azurerm_role_definition.this[each.key].role_definition_resource_id
  principal_id       = azurerm_user_assigned_identity.this[each.key].principal_id
  principal_type     = "ServicePrincipal"
}

resource "azurerm_federated_identity_credential" "this" {
  for_each = local.federated

  name                = each.key
  resource_group_name = var.resource_group.name
  parent_id           = azurerm_user_assigned_identity.this[each.value.role].id
  issuer              = var.aks_oidc_issuer_url
  subject             = "system:serviceaccount:${replace(each.value.account, "/", ":")}"
  audience            = ["api://AzureADTokenExchange"]
}

# The settings are those of the account, which the custom roles know nothing of.
resource "azurerm_role_definition" "inspect" {
  count = var.inspect ? 1 : 0

  name              = "cloudckpt settings of ${var.storage_account_name}"
  description       = "Reads how long checkpoints and their versions are kept."
  scope             = var.resource_group.id
  assignable_scopes = [var.resource_group.id]

  permissions {
    actions = [
      "Microsoft.Storage/storageAccounts/blobServices/read",
      "Microsoft.Storage/storageAccounts/managementPolicies/read",
    ]
  }
}

resource "azurerm_role_assignment" "inspect" {
  for_each = var.inspect ? local.roles : toset([])

  scope              = azurerm_storage_account.checkpoints.id
  role_definition_id = azurerm_role_definition.inspect[0].role_definition_resource_id
  principal_id       = azurerm_user_assigned_identity.this[each.key].principal_id
  principal_type     = "ServicePrincipal"
}

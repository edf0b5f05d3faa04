terraform {
  required_version = ">= 1.9"

  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = ">= 4.9, < 5.0"
    }
  }
}

provider "azurerm" {
  storage_use_azuread = true # the account takes no keys, from Terraform neither

  features {}
}

resource "azurerm_resource_group" "example" {
  name     = "example-training"
  location = "westeurope"
}

module "checkpoints" {
  source = "../.."

  resource_group       = azurerm_resource_group.example
  storage_account_name = "examplecheckpoints"
  aks_oidc_issuer_url  = "https://westeurope.oic.prod-aks.azure.com/00000000-0000-0000-0000-000000000000/00000000-0000-0000-0000-000000000000/"
  service_accounts = {
    writer = ["training/trainer"]
    reader = ["serving/server"]
  }
}

output "uri" {
  description = "What the locations of checkpoints begin with."
  value       = module.checkpoints.uri
}

output "environment" {
  description = "Environment variables to set where cloudckpt runs."
  value       = module.checkpoints.environment
}

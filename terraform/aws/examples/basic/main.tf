terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0, < 7.0"
    }
  }
}

provider "aws" {
  region = "eu-central-1"
}

module "checkpoints" {
  source = "../.."

  name        = "example-checkpoints"
  eks_cluster = { name = "training" }
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

terraform {
  required_version = ">= 1.9"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.0, < 8.0"
    }
  }
}

provider "google" {
  project = "example-project"
}

module "checkpoints" {
  source = "../.."

  project_id = "example-project"
  name       = "example-checkpoints"
  location   = "europe-west4"
  gke_project = {
    id     = "example-project"
    number = "123456789012"
  }
  service_accounts = {
    writer = ["training/trainer"]
    reader = ["serving/server"]
  }
}

output "uri" {
  description = "What the locations of checkpoints begin with."
  value       = module.checkpoints.uri
}

# A cluster whose name is known only once it is made.
resource "terraform_data" "cluster" {}

module "checkpoints" {
  source = "../.."

  name        = "example-checkpoints"
  eks_cluster = { name = terraform_data.cluster.id }
  service_accounts = {
    writer = ["training/trainer"]
    reader = ["serving/server"]
  }
}

output "pods" {
  description = "The service accounts that get a role."
  value       = module.checkpoints.pods
}

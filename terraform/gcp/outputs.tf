output "uri" {
  description = "What the locations of checkpoints begin with."
  value       = "gs://${google_storage_bucket.checkpoints.name}"
}

output "environment" {
  description = "Environment variables to set where cloudckpt runs: none, credentials and endpoint are found without."
  value       = {}
}

output "role_ids" {
  description = "Ids of the custom roles \"reader\" and \"writer\", to grant to other members on the bucket."
  value       = { for role, made in google_project_iam_custom_role.this : role => made.id }
}

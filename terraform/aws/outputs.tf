output "uri" {
  description = "What the locations of checkpoints begin with."
  value       = "s3://${aws_s3_bucket.checkpoints.id}"
}

output "environment" {
  description = "Environment variables to set where cloudckpt runs."
  value       = { AWS_REGION = aws_s3_bucket.checkpoints.region }
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.checkpoints.arn
}

output "policy_arns" {
  description = "ARNs of the policies \"reader\" and \"writer\", to attach to other roles."
  value       = { for role, policy in aws_iam_policy.access : role => policy.arn }
}

output "role_arns" {
  description = "ARNs of the roles \"reader\" and \"writer\", as far as somebody may assume them. IRSA wants it as the service account's annotation eks.amazonaws.com/role-arn."
  value       = { for role, made in aws_iam_role.this : role => made.arn }
}

output "instance_profile_names" {
  description = "Names of the instance profiles of the roles."
  value       = { for role, profile in aws_iam_instance_profile.this : role => profile.name }
}

output "pods" {
  description = "The service accounts, each as \"namespace/name\", that get a role by EKS Pod Identity."
  value       = keys(aws_eks_pod_identity_association.this)
}

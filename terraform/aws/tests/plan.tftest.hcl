mock_provider "aws" {
  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }
}

variables {
  name = "example-checkpoints"
}

run "private_by_default" {
  command = plan

  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.checkpoints.block_public_acls,
      aws_s3_bucket_public_access_block.checkpoints.block_public_policy,
      aws_s3_bucket_public_access_block.checkpoints.ignore_public_acls,
      aws_s3_bucket_public_access_block.checkpoints.restrict_public_buckets,
    ])
    error_message = "The bucket may become public."
  }

  assert {
    condition     = length(aws_s3_bucket_versioning.checkpoints) + length(aws_iam_role.this) + length(aws_vpc_endpoint.s3) == 0
    error_message = "Something is made that nobody asked for."
  }

  assert {
    condition     = !anytrue([for rule in aws_s3_bucket_lifecycle_configuration.checkpoints.rule : rule.id == "expire-checkpoints"])
    error_message = "Checkpoints expire unasked."
  }

  assert {
    condition     = length(setsubtract(local.s3_actions["reader"], ["s3:GetObject", "s3:ListBucket"])) == 0
    error_message = "A reader may do more than read."
  }

  assert {
    condition     = contains(local.s3_actions["writer"], "s3:DeleteObject")
    error_message = "A writer can not tidy up."
  }
}

run "a_cluster_of_the_same_plan" {
  command = plan

  module {
    source = "./tests/cluster"
  }

  assert {
    condition     = length(output.pods) == 2
    error_message = "Pods of a cluster whose name is not known yet get no roles."
  }
}

run "service_accounts_need_a_cluster" {
  command = plan

  variables {
    service_accounts = { writer = ["training/trainer"] }
  }

  expect_failures = [var.service_accounts]
}

run "instances" {
  command = plan

  variables {
    instance_profiles = true
  }

  assert {
    condition     = length(aws_iam_instance_profile.this) == 2
    error_message = "Instances can not have both roles."
  }
}

run "append_only" {
  command = plan

  variables {
    append_only = true
  }

  assert {
    condition     = !contains(local.s3_actions["writer"], "s3:DeleteObject") && contains(local.s3_actions["writer"], "s3:AbortMultipartUpload")
    error_message = "A writer may delete objects, or can not abort its uploads."
  }
}

run "gateway_endpoint" {
  command = plan

  variables {
    gateway_endpoint = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"] }
  }

  assert {
    condition     = aws_vpc_endpoint.s3[0].vpc_endpoint_type == "Gateway"
    error_message = "The endpoint is billed."
  }
}

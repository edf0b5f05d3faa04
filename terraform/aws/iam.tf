locals {
  permissions = jsondecode(file("${path.module}/permissions.json"))
  roles       = toset(["reader", "writer"])

  s3_actions = { for role in local.roles : role => [
    for action in distinct(flatten([
      values(local.permissions[role]),
      [for option in var.object_options : values(local.permissions.options[option][role])],
    ])) : action if !(var.append_only && startswith(action, "s3:Delete"))
  ] }
  kms_actions = { for role in local.roles : role => distinct(flatten(values(local.permissions.options.kms[role]))) }

  # a role that nobody can assume has no valid trust policy
  assumed_roles = toset([for role in local.roles : role if var.instance_profiles || length(var.service_accounts[role]) > 0])
}

data "aws_partition" "current" {}

data "aws_iam_policy_document" "access" {
  for_each = local.roles

  statement {
    sid       = "Bucket"
    actions   = [for action in local.s3_actions[each.key] : action if startswith(action, "s3:ListBucket")]
    resources = [aws_s3_bucket.checkpoints.arn]
  }

  statement {
    sid       = "Objects"
    actions   = [for action in local.s3_actions[each.key] : action if !startswith(action, "s3:ListBucket")]
    resources = ["${aws_s3_bucket.checkpoints.arn}/*"]
  }

  dynamic "statement" {
    for_each = var.inspect ? [aws_s3_bucket.checkpoints.arn] : []

    content {
      sid       = "Settings"
      actions   = ["s3:GetBucketVersioning", "s3:GetLifecycleConfiguration"]
      resources = [statement.value]
    }
  }

  dynamic "statement" {
    for_each = var.kms_key_arn[*]

    content {
      sid       = "Key"
      actions   = local.kms_actions[each.key]
      resources = [statement.value]

      condition {
        test     = "StringEquals"
        variable = "kms:ViaService"
        values   = ["s3.${aws_s3_bucket.checkpoints.region}.${data.aws_partition.current.dns_suffix}"]
      }
    }
  }
}

resource "aws_iam_policy" "access" {
  for_each = local.roles

  name        = "${var.name}-${each.key}"
  description = "What cloudckpt needs as a ${each.key} of checkpoints in ${var.name}."
  policy      = data.aws_iam_policy_document.access[each.key].json
  tags        = var.tags
}

data "aws_iam_policy_document" "trust" {
  for_each = local.assumed_roles

  dynamic "statement" {
    for_each = length(var.service_accounts[each.key]) > 0 ? var.eks_cluster[*] : []

    content {
      sid     = "PodIdentity"
      actions = ["sts:AssumeRole", "sts:TagSession"]

      principals {
        type        = "Service"
        identifiers = ["pods.eks.amazonaws.com"]
      }
    }
  }

  dynamic "statement" {
    for_each = length(var.service_accounts[each.key]) > 0 ? var.oidc_provider_arn[*] : []

    content {
      sid     = "ServiceAccounts"
      actions = ["sts:AssumeRoleWithWebIdentity"]

      principals {
        type        = "Federated"
        identifiers = [statement.value]
      }

      condition {
        test     = "StringEquals"
        variable = "${replace(statement.value, "/^.*:oidc-provider\\//", "")}:aud"
        values   = ["sts.amazonaws.com"]
      }

      condition {
        test     = "StringEquals"
        variable = "${replace(statement.value, "/^.*:oidc-provider\\//", "")}:sub"
        values   = [for account in var.service_accounts[each.key] : "system:serviceaccount:${replace(account, "/", ":")}"]
      }
    }
  }

  dynamic "statement" {
    for_each = var.instance_profiles ? ["ec2.amazonaws.com"] : []

    content {
      sid     = "Instances"
      actions = ["sts:AssumeRole"]

      principals {
        type        = "Service"
        identifiers = [statement.value]
      }
    }
  }
}

resource "aws_iam_role" "this" {
  for_each = local.assumed_roles

  name               = "${var.name}-${each.key}"
  description        = "Role of the ${each.key}s of checkpoints in ${var.name}."
  assume_role_policy = data.aws_iam_policy_document.trust[each.key].json
  tags               = var.tags
}

resource "aws_iam_role_policy_attachment" "access" {
  for_each = local.assumed_roles

  role       = aws_iam_role.this[each.key].name
  policy_arn = aws_iam_policy.access[each.key].arn
}

resource "aws_eks_pod_identity_association" "this" {
  # a pod has one role: who writes, reads with that
  for_each = var.eks_cluster == null ? {} : merge([
    for role in local.assumed_roles : { for account in var.service_accounts[role] : account => role }
  ]...)

  cluster_name    = var.eks_cluster.name
  namespace       = split("/", each.key)[0]
  service_account = split("/", each.key)[1]
  role_arn        = aws_iam_role.this[each.value].arn
  tags            = var.tags
}

resource "aws_iam_instance_profile" "this" {
  for_each = var.instance_profiles ? local.assumed_roles : toset([])

  name = "${var.name}-${each.key}"
  role = aws_iam_role.this[each.key].name
  tags = var.tags
}

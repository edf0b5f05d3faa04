resource "aws_s3_bucket" "checkpoints" {
  #checkov:skip=CKV_AWS_18:a training job reads and writes too much for access logs by default; attach them outside
  #checkov:skip=CKV_AWS_21:replaced checkpoints are garbage unless keep_noncurrent_days asks for them
  #checkov:skip=CKV_AWS_144:checkpoints are made again by the job, replicas in another region cost more than that
  #checkov:skip=CKV_AWS_145:kms_key_arn is the user's choice; without it S3 encrypts with its own keys
  #checkov:skip=CKV2_AWS_62:nothing listens to events
  bucket = var.name
  tags   = var.tags
}

resource "aws_s3_bucket_public_access_block" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  rule {
    bucket_key_enabled = var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_versioning" "checkpoints" {
  count = var.keep_noncurrent_days > 0 ? 1 : 0

  bucket = aws_s3_bucket.checkpoints.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id

  rule {
    id     = "abort-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = var.abort_uploads_after_days
    }
  }

  # also without versioning: what it has left, if it was on before, would stay and be billed for ever
  rule {
    id     = "expire-noncurrent"
    status = "Enabled"

    filter {}

    expiration {
      expired_object_delete_marker = true
    }

    noncurrent_version_expiration {
      noncurrent_days = max(var.keep_noncurrent_days, 1)
    }
  }

  # by the age of each object, since filters know prefixes, tags and sizes: see README.md
  dynamic "rule" {
    for_each = var.expiration[*]

    content {
      id     = "expire-checkpoints"
      status = "Enabled"

      filter {
        prefix = rule.value.prefix
      }

      expiration {
        days = rule.value.days
      }
    }
  }

  depends_on = [aws_s3_bucket_versioning.checkpoints]
}

data "aws_iam_policy_document" "tls_only" {
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.checkpoints.arn, "${aws_s3_bucket.checkpoints.arn}/*"]

    principals {
      type        = "*"
      identifiers = ["*"]
    }

    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "checkpoints" {
  bucket = aws_s3_bucket.checkpoints.id
  policy = data.aws_iam_policy_document.tls_only.json

  depends_on = [aws_s3_bucket_public_access_block.checkpoints]
}

resource "aws_vpc_endpoint" "s3" {
  count = var.gateway_endpoint == null ? 0 : 1

  vpc_id            = var.gateway_endpoint.vpc_id
  route_table_ids   = var.gateway_endpoint.route_table_ids
  service_name      = "com.amazonaws.${aws_s3_bucket.checkpoints.region}.s3"
  vpc_endpoint_type = "Gateway"
  tags              = var.tags
}

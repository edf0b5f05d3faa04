data "google_storage_project_service_account" "storage" {
  count = var.kms_key == null ? 0 : 1

  project = var.project_id
}

resource "google_kms_crypto_key_iam_member" "storage" {
  count = var.kms_key == null ? 0 : 1

  crypto_key_id = var.kms_key.id
  role          = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
  member        = "serviceAccount:${data.google_storage_project_service_account.storage[0].email_address}"
}

# Whether a client uses TLS is not a setting of the bucket: cloudckpt speaks TLS to Google unless an endpoint with http:// is given.
resource "google_storage_bucket" "checkpoints" {
  #checkov:skip=CKV_GCP_62:a training job reads and writes too much for access logs by default; attach them outside
  #checkov:skip=CKV_GCP_78:replaced checkpoints are garbage unless keep_noncurrent_days asks for them
  project  = var.project_id
  name     = var.name
  location = var.location
  labels   = var.labels

  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  soft_delete_policy {
    retention_duration_seconds = var.soft_delete_days * 86400
  }

  versioning {
    enabled = var.keep_noncurrent_days > 0
  }

  dynamic "encryption" {
    for_each = var.kms_key[*]

    content {
      default_kms_key_name = encryption.value.id
    }
  }

  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }

    condition {
      age = var.abort_uploads_after_days
    }
  }

  # also without versioning: what it has left, if it was on before, would stay and be billed for ever
  lifecycle_rule {
    action {
      type = "Delete"
    }

    condition {
      days_since_noncurrent_time = max(var.keep_noncurrent_days, 1)
      with_state                 = "ARCHIVED"
    }
  }

  # what makes a checkpoint goes first: rules run in any order, and not on the minute
  dynamic "lifecycle_rule" {
    for_each = var.expiration[*]

    content {
      action {
        type = "Delete"
      }

      condition {
        age            = lifecycle_rule.value.days
        matches_prefix = [lifecycle_rule.value.prefix]
        matches_suffix = [".metadata"]
        with_state     = "LIVE"
      }
    }
  }

  dynamic "lifecycle_rule" {
    for_each = var.expiration[*]

    content {
      action {
        type = "Delete"
      }

      condition {
        age            = lifecycle_rule.value.days + 2
        matches_prefix = [lifecycle_rule.value.prefix]
        with_state     = "LIVE"
      }
    }
  }

  depends_on = [google_kms_crypto_key_iam_member.storage]
}

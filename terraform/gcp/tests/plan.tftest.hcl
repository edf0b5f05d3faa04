mock_provider "google" {}

variables {
  project_id = "example"
  name       = "example-checkpoints"
  location   = "EU"
}

run "private_by_default" {
  command = plan

  assert {
    condition     = google_storage_bucket.checkpoints.public_access_prevention == "enforced" && google_storage_bucket.checkpoints.uniform_bucket_level_access
    error_message = "The bucket may become public."
  }

  assert {
    condition     = length(setsubtract(local.granted["reader"], ["storage.objects.get", "storage.objects.list"])) == 0
    error_message = "A reader may do more than read."
  }

  assert {
    condition     = length(google_storage_bucket_iam_member.this) == 0
    error_message = "Somebody has access unasked."
  }
}

run "pods" {
  command = plan

  variables {
    gke_project      = { id = "example", number = "1" }
    service_accounts = { writer = ["training/trainer"] }
  }

  assert {
    condition     = length(google_storage_bucket_iam_member.this) == 1
    error_message = "The pod gets no access."
  }
}

run "append_only" {
  command = plan

  variables {
    append_only = true
    inspect     = true
  }

  assert {
    condition     = !contains(local.granted["writer"], "storage.objects.delete") && contains(local.granted["writer"], "storage.buckets.get")
    error_message = "A writer may delete objects, or can not see the bucket's settings."
  }
}

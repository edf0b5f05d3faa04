locals {
  permissions = jsondecode(file("${path.module}/permissions.json"))
  roles       = toset(["reader", "writer"])

  granted = { for role in local.roles : role => [
    for permission in distinct(concat(flatten(values(local.permissions[role])), var.inspect ? ["storage.buckets.get"] : [])) :
    permission if !(var.append_only && permission == "storage.objects.delete")
  ] }

  # a pod is granted access under its own name, without a Google service account in between
  pool = var.gke_project == null ? "" : "principal://iam.googleapis.com/projects/${var.gke_project.number}/locations/global/workloadIdentityPools/${var.gke_project.id}.svc.id.goog/subject"
  grants = merge(
    { for pair in flatten([for role in local.roles : [for account in var.service_accounts[role] : { role = role, account = account }]]) :
      "${pair.role} ${pair.account}" => {
        role   = pair.role
        member = "${local.pool}/ns/${split("/", pair.account)[0]}/sa/${split("/", pair.account)[1]}"
      }
    },
    { for pair in flatten([for role in local.roles : [for member in var.members[role] : { role = role, member = member }]]) :
      "${pair.role} ${pair.member}" => pair
    },
  )
}

resource "google_project_iam_custom_role" "this" {
  for_each = local.roles

  project     = var.project_id
  role_id     = "${replace(var.name, "-", "_")}_${each.key}"
  title       = "cloudckpt ${each.key} of ${var.name}"
  description = "What cloudckpt needs as a ${each.key} of checkpoints."
  permissions = local.granted[each.key]
}

resource "google_storage_bucket_iam_member" "this" {
  for_each = local.grants

  bucket = google_storage_bucket.checkpoints.name
  role   = google_project_iam_custom_role.this[each.value.role].id
  member = each.value.member
}

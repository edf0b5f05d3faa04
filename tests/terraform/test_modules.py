"""The Terraform modules: whole in themselves, private, and granting what permissions.json lists."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hcl2
import pytest

ROOT = Path(__file__).parents[2] / "terraform"
CLOUDS = ("aws", "azure", "gcp")
FILES = sorted(ROOT.rglob("*.tf"))

RESOURCES = {
    "aws": {
        "aws_eks_pod_identity_association",
        "aws_iam_instance_profile",
        "aws_iam_policy",
        "aws_iam_role",
        "aws_iam_role_policy_attachment",
        "aws_s3_bucket",
        "aws_s3_bucket_lifecycle_configuration",
        "aws_s3_bucket_ownership_controls",
        "aws_s3_bucket_policy",
        "aws_s3_bucket_public_access_block",
        "aws_s3_bucket_server_side_encryption_configuration",
        "aws_s3_bucket_versioning",
    },
    "azure": {
        "azurerm_federated_identity_credential",
        "azurerm_role_assignment",
        "azurerm_role_definition",
        "azurerm_storage_account",
        "azurerm_storage_container",
        "azurerm_storage_management_policy",
        "azurerm_user_assigned_identity",
    },
    "gcp": {
        "google_kms_crypto_key_iam_member",
        "google_project_iam_custom_role",
        "google_storage_bucket",
        "google_storage_bucket_iam_member",
    },
}
FORMS = {
    "aws": r"(s3|kms):[A-Z]\w+",
    "azure": r"Microsoft\.Storage/storageAccounts/blobServices/containers/blobs/[a-z/]+",
    "gcp": r"storage\.(objects|multipartUploads)\.[a-z]+",
}
SCHEMES = {"aws": "s3", "azure": "az", "gcp": "gs"}

LIFECYCLE = {  # with the rules, their type, and what says how old versions become
    "aws": (
        "aws_s3_bucket_lifecycle_configuration.checkpoints",
        "rule",
        "noncurrent_days",
    ),
    "azure": (
        "azurerm_storage_management_policy.checkpoints",
        "rule",
        "delete_after_days_since_creation",
    ),
    "gcp": (
        "google_storage_bucket.checkpoints",
        "lifecycle_rule",
        "days_since_noncurrent_time",
    ),
}

Tree = dict[str, Any]


def _plain(value: Any) -> Any:
    """What python-hcl2 read, without its marks and without the quotes around strings."""
    if isinstance(value, str):
        return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items() if not k.startswith("__")}
    return value


def read(folder: Path) -> Tree:
    """The blocks of all files of a folder: by type, then by their labels joined with dots."""
    tree: Tree = {}
    for file in sorted(folder.glob("*.tf")):
        with file.open() as stream:
            parsed = _plain(hcl2.load(stream))
        for kind, blocks in parsed.items():
            labels = {"resource": 2, "data": 2, "terraform": 0, "locals": 0}.get(kind, 1)
            for block in blocks:
                name = []
                for _ in range(labels):
                    [(label, block)] = block.items()
                    name.append(label)
                tree.setdefault(kind, {}).setdefault(".".join(name), {}).update(block)
    return tree


def strings(value: Any) -> Iterator[str]:
    """All strings in a tree, expressions among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield key
            yield from strings(entry)


def values(value: Any, name: str) -> Iterator[Any]:
    """What stands behind a name, anywhere in a tree."""
    if isinstance(value, list):
        for entry in value:
            yield from values(entry, name)
    elif isinstance(value, dict):
        for key, entry in value.items():
            if key == name:
                yield entry
            yield from values(entry, name)


def referred(tree: Tree | list[Tree], pattern: str) -> set[str]:
    """What the expressions of a tree name."""
    return {match for text in strings(tree) for match in re.findall(pattern, text)}


def blocks(block: Tree, name: str) -> list[Tree]:
    """The nested blocks of a type, the dynamic ones among them."""
    found = list(block.get(name, []))
    for dynamic in block.get("dynamic", []):
        if name in dynamic:
            found += dynamic[name]["content"]
    return found


@pytest.fixture(scope="module", params=CLOUDS)
def cloud(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def module(cloud) -> Tree:
    return read(ROOT / cloud)


@pytest.fixture(scope="module")
def example(cloud) -> Tree:
    return read(ROOT / cloud / "examples" / "basic")


@pytest.fixture(scope="module")
def aws() -> Tree:
    return read(ROOT / "aws")


@pytest.fixture(scope="module")
def gcp() -> Tree:
    return read(ROOT / "gcp")


@pytest.fixture(scope="module")
def azure() -> Tree:
    return read(ROOT / "azure")


class TestAllModules:
    @pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
    def test_files_parse_and_hold_something(self, file):
        with file.open() as stream:
            assert hcl2.load(stream)

    def test_the_promised_resources_are_made(self, cloud, module):
        assert {name.split(".")[0] for name in module["resource"]} == RESOURCES[cloud]

    def test_versions_are_bounded(self, module):
        terraform = module["terraform"][""]
        assert terraform["required_version"] == ">= 1.9"
        for provider in terraform["required_providers"][0].values():
            assert re.fullmatch(r">= [\d.]+, < [\d.]+", provider["version"])

    def test_variables_are_described_typed_and_declared_in_their_file(self, cloud, module):
        declared = read_names(ROOT / cloud / "variables.tf", "variable")
        assert declared == set(module["variable"])
        for name, variable in module["variable"].items():
            assert variable["description"].endswith("."), name
            assert variable["type"], name

    def test_outputs_are_described_and_name_the_place(self, cloud, module):
        for name, output in module["output"].items():
            assert output["description"].endswith("."), name
        assert module["output"]["uri"]["value"].startswith(f"{SCHEMES[cloud]}://${{")
        assert set(module["output"]) >= {"uri", "environment"}

    @pytest.mark.parametrize("kind", ["variable", "local"])
    def test_names_are_declared_and_used(self, module, kind):
        declared = set(module["variable"] if kind == "variable" else module["locals"][""])
        prefix = "var" if kind == "variable" else "local"
        rest = {key: value for key, value in module.items() if key != "variable"}
        assert referred(rest, rf"\b{prefix}\.(\w+)") == declared
        assert referred(module, rf"\b{prefix}\.(\w+)") == declared

    def test_references_lead_to_resources_and_data_that_exist(self, module):
        bodies = [body for blocks in module.values() for body in blocks.values()]
        everything = referred(bodies, r"((?:\bdata\.)?\b(?:aws|azurerm|google)_\w+\.\w+)")
        data = {name for name in everything if name.startswith("data.")}
        assert data == {f"data.{name}" for name in module.get("data", {})}
        assert everything - data <= set(module["resource"])

    def test_permissions_are_read_from_the_file_beside_the_module(self, cloud, module):
        expected = 'jsondecode(file("${path.module}/permissions.json"))'
        assert module["locals"][""]["permissions"] == f"${{{expected}}}"
        assert (ROOT / cloud / "permissions.json").is_file()

    def test_expiration_of_checkpoints_and_versions_are_off(self, module):
        assert module["variable"]["expiration"]["default"] in (None, "null")
        assert module["variable"]["keep_noncurrent_days"]["default"] == 0

    def test_old_versions_expire_also_if_versioning_was_turned_off(self, cloud, module):
        """What it has left would stay, and be billed, for ever."""
        resource, rules, age = LIFECYCLE[cloud]
        block = module["resource"][resource]
        assert "count" not in block
        [days] = [found for rule in block[rules] for found in values(rule, age)]
        assert days == "${max(var.keep_noncurrent_days, 1)}"

    def test_it_is_told_what_expires_when(self, cloud, module):
        """S3 and Azure have no filter by which what makes a checkpoint could go first."""
        about, readme = module["variable"], (ROOT / cloud / "README.md").read_text()
        assert "turned off" in about["keep_noncurrent_days"]["description"]
        assert ".metadata" in readme
        if cloud != "gcp":
            assert ".metadata" in about["expiration"]["description"]
            assert "can't be loaded" in about["expiration"]["description"]

    def test_readme_names_only_variables_and_outputs_that_exist(self, cloud, module):
        words = re.findall(r"`(\w+_\w+)(?: = [^`]*)?`", (ROOT / cloud / "README.md").read_text())
        known = {*module["variable"], *module["output"], "AZURE_CLIENT_ID", "storage_use_azuread"}
        assert set(words) <= known


def read_names(file: Path, kind: str) -> set[str]:
    with file.open() as stream:
        return {name for block in _plain(hcl2.load(stream))[kind] for name in block}


class TestExamples:
    def test_the_module_is_called_by_a_relative_path(self, example):
        [call] = example["module"].values()
        assert call["source"] == "../.."

    def test_the_module_gets_what_it_requires_and_nothing_unknown(self, module, example):
        [call] = example["module"].values()
        required = {name for name, entry in module["variable"].items() if "default" not in entry}
        assert required <= set(call) - {"source"} <= set(module["variable"])

    def test_outputs_of_the_module_exist(self, module, example):
        assert referred(example["output"], r"module\.checkpoints\.(\w+)") <= set(module["output"])

    def test_versions_are_those_of_the_module(self, module, example):
        assert example["terraform"] == module["terraform"]


def permissions(cloud: str) -> Tree:
    return json.loads((ROOT / cloud / "permissions.json").read_text())


class TestPermissions:
    def test_each_operation_needs_something_and_nothing_by_a_wildcard(self, cloud):
        listed = permissions(cloud)
        maps = [listed["reader"], listed["writer"]]
        maps += [role for option in listed.get("options", {}).values() for role in option.values()]
        for needed in [needed for operations in maps for needed in operations.values()]:
            assert needed == sorted(set(needed))
            assert needed
            assert all(re.fullmatch(FORMS[cloud], permission) for permission in needed)

    def test_a_reader_may_do_nothing_that_a_writer_may_not(self, cloud):
        listed = permissions(cloud)
        for roles in (listed, *listed.get("options", {}).values()):
            assert roles["reader"].items() <= roles["writer"].items()

    def test_a_reader_changes_nothing(self, cloud):
        needed = {entry for entries in permissions(cloud)["reader"].values() for entry in entries}
        changing = re.compile(r"put|write|delete|create|abort|add|action", re.IGNORECASE)
        assert not [entry for entry in needed if changing.search(entry)]

    def test_options_concern_operations_of_their_role(self, cloud):
        listed = permissions(cloud)
        for roles in listed.get("options", {}).values():
            for role, operations in roles.items():
                assert set(operations) <= set(listed[role])


class TestAws:
    def test_nothing_is_public(self, aws):
        block = aws["resource"]["aws_s3_bucket_public_access_block.checkpoints"]
        switches = {name: value for name, value in block.items() if name != "bucket"}
        assert len(switches) == 4
        assert all(value is True for value in switches.values())
        [rule] = aws["resource"]["aws_s3_bucket_ownership_controls.checkpoints"]["rule"]
        assert rule["object_ownership"] == "BucketOwnerEnforced"

    def test_uploads_are_aborted_after_two_days(self, aws):
        rules = blocks(aws["resource"]["aws_s3_bucket_lifecycle_configuration.checkpoints"], "rule")
        [abort] = [rule for rule in rules if "abort_incomplete_multipart_upload" in rule]
        assert abort["status"] == "Enabled"
        [days] = abort["abort_incomplete_multipart_upload"]
        assert days["days_after_initiation"] == "${var.abort_uploads_after_days}"
        assert aws["variable"]["abort_uploads_after_days"]["default"] == 2

    def test_versions_are_kept_only_where_that_is_asked_for(self, aws):
        versioning = aws["resource"]["aws_s3_bucket_versioning.checkpoints"]
        assert "keep_noncurrent_days > 0" in versioning["count"]

    def test_markers_of_deletions_go_with_the_last_version(self, aws):
        lifecycle = aws["resource"]["aws_s3_bucket_lifecycle_configuration.checkpoints"]
        [rule] = [rule for rule in lifecycle["rule"] if rule["id"] == "expire-noncurrent"]
        assert rule["expiration"] == [{"expired_object_delete_marker": True}]

    @pytest.mark.parametrize(
        "word", ["Object Lock", "s3:if-none-match", "s3:if-match", "s3:ObjectCreationOperation"]
    )
    def test_readme_tells_of_locks_and_of_policies_that_demand_conditions(self, word):
        assert word in (ROOT / "aws" / "README.md").read_text()

    def test_requests_without_tls_are_denied(self, aws):
        [statement] = aws["data"]["aws_iam_policy_document.tls_only"]["statement"]
        assert statement["effect"] == "Deny"
        [condition] = statement["condition"]
        assert (condition["variable"], condition["values"]) == ("aws:SecureTransport", ["false"])

    def test_what_is_allowed_is_neither_every_action_nor_every_resource(self, aws):
        for name, document in aws["data"].items():
            for statement in blocks(document, "statement"):
                if statement.get("effect") == "Deny":
                    continue
                assert "*" not in "".join(strings(statement["actions"])), name
                assert statement.get("effect", "Allow") == "Allow"
                for resource in statement.get("resources", []):
                    assert resource.removesuffix("/*") in (
                        "${aws_s3_bucket.checkpoints.arn}",
                        "${statement.value}",
                    ), name
                for principals in statement.get("principals", []):
                    assert "*" not in "".join(strings(principals)), name

    def test_the_roles_get_what_is_listed(self, aws):
        statements = blocks(aws["data"]["aws_iam_policy_document.access"], "statement")
        sources = [referred(entry["actions"], r"local\.(\w+)") for entry in statements]
        assert sources == [{"s3_actions"}, {"s3_actions"}, {"kms_actions"}]


class TestGcp:
    def test_nothing_is_public(self, gcp):
        bucket = gcp["resource"]["google_storage_bucket.checkpoints"]
        assert bucket["public_access_prevention"] == "enforced"
        assert bucket["uniform_bucket_level_access"] is True

    def test_uploads_are_aborted_after_two_days(self, gcp):
        rules = blocks(gcp["resource"]["google_storage_bucket.checkpoints"], "lifecycle_rule")
        by_type = {rule["action"][0]["type"]: rule for rule in rules}
        [condition] = by_type["AbortIncompleteMultipartUpload"]["condition"]
        assert condition == {"age": "${var.abort_uploads_after_days}"}
        assert gcp["variable"]["abort_uploads_after_days"]["default"] == 2

    def test_what_makes_a_checkpoint_expires_days_before_its_data(self, gcp):
        bucket = gcp["resource"]["google_storage_bucket.checkpoints"]
        dynamic = [
            entry["lifecycle_rule"] for entry in bucket["dynamic"] if "lifecycle_rule" in entry
        ]
        conditions = [rule["content"][0]["condition"][0] for rule in dynamic]
        days = "lifecycle_rule.value.days"
        ages = {tuple(entry.get("matches_suffix", ())): entry["age"] for entry in conditions}
        assert ages == {(".metadata",): f"${{{days}}}", (): f"${{{days} + 2}}"}

    def test_soft_delete_is_the_users_choice_and_its_price_is_told(self, gcp):
        assert "billed" in gcp["variable"]["soft_delete_days"]["description"]
        [policy] = gcp["resource"]["google_storage_bucket.checkpoints"]["soft_delete_policy"]
        assert "var.soft_delete_days" in policy["retention_duration_seconds"]

    def test_the_roles_get_what_is_listed_on_the_bucket_alone(self, gcp):
        role = gcp["resource"]["google_project_iam_custom_role.this"]
        assert role["permissions"] == "${distinct(flatten(values(local.permissions[each.key])))}"
        member = gcp["resource"]["google_storage_bucket_iam_member.this"]
        assert member["bucket"] == "${google_storage_bucket.checkpoints.name}"
        assert member["role"].startswith("${google_project_iam_custom_role.this[")


class TestAzure:
    def test_nothing_is_public_or_open_to_keys(self, azure):
        account = azure["resource"]["azurerm_storage_account.checkpoints"]
        assert account["allow_nested_items_to_be_public"] is False
        assert account["shared_access_key_enabled"] is False
        assert account["https_traffic_only_enabled"] is True
        assert account["min_tls_version"] == "TLS1_2"
        container = azure["resource"]["azurerm_storage_container.checkpoints"]
        assert container["container_access_type"] == "private"

    def test_it_is_told_from_when_the_age_of_a_version_counts(self, azure):
        """From when it was written, as Azure documents, not from when it was replaced."""
        described = azure["variable"]["keep_noncurrent_days"]["description"]
        readme = (ROOT / "azure" / "README.md").read_text()
        for text in (described, readme):
            assert "since it was written" in " ".join(text.split())
            assert "soft_delete_days" in text

    def test_it_is_told_that_azure_discards_uploads_by_itself(self):
        assert "7 days" in (ROOT / "azure" / "main.tf").read_text()

    def test_the_roles_get_what_is_listed_on_the_container_alone(self, azure):
        [granted] = azure["resource"]["azurerm_role_definition.this"]["permissions"]
        assert granted == {"data_actions": "${local.data_actions[each.key]}"}
        assignment = azure["resource"]["azurerm_role_assignment.this"]
        assert assignment["scope"] == "${azurerm_storage_container.checkpoints.id}"
        assert "role_definition_name" not in assignment

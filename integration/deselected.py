"""What a server can't do, by the name of the test that needs it, and why.

A test that stands here is deselected for that server only, and shown as such in pytest's summary.
"""

from __future__ import annotations

__all__ = ["DESELECTED"]

_IGNORES_CONDITIONS = (
    "it ignores all preconditions; on the stub of tests/support/stubs this is covered by "
    "tests/stores/test_gcs_contract.py"
)
_KEEPS_METADATA = (
    "its copies have the metadata of the source, whatever the request says; on the stub of "
    "tests/support/stubs this is covered by tests/stores/test_gcs_contract.py"
)
_ONE_OF_TWO_UPLOADS = (
    "Azure discards the blocks of the other upload when the first is completed: "
    "test_of_two_uploads_of_one_key_the_first_to_be_completed_wins"
)
_WHOLE_NAMES_ONLY = (
    "it lists the uploads of one object, given by its whole key, and no others; moto lists all"
)

DESELECTED: dict[str, dict[str, str]] = {
    "gcp-storage-emulator": dict.fromkeys(
        (
            "test_put_if_absent_leaves_an_object_that_is_there",
            "test_one_of_many_writers_that_put_if_absent_at_once_wins",
            "test_put_if_version_replaces_that_version_and_brings_nothing_back",
            "test_of_two_writers_the_second_to_commit_is_told",
        ),
        _IGNORES_CONDITIONS,
    )
    | {"test_a_copy_has_a_name_of_its_own": _KEEPS_METADATA},
    "minio": dict.fromkeys(
        (
            "test_an_upload_is_listed_and_the_object_is_not_until_it_is_complete",
            "test_uploads_are_listed_by_the_beginning_of_their_keys",
            "test_an_upload_that_was_listed_can_be_aborted_and_is_gone",
            "test_a_key_is_taken_as_it_is",
        ),
        _WHOLE_NAMES_ONLY,
    ),
    "azurite": {"test_two_uploads_of_one_key_do_not_mix": _ONE_OF_TWO_UPLOADS},
    "microsoft": {"test_two_uploads_of_one_key_do_not_mix": _ONE_OF_TWO_UPLOADS},
}

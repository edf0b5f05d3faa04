"""One conditional write decides: ours, theirs, or unknown, and never a wrong answer."""

import dataclasses
import functools
import itertools
import logging
import uuid

import pytest

from cloudckpt import errors
from cloudckpt.checkpoint import baseline
from cloudckpt.checkpoint.baseline import Baseline
from cloudckpt.checkpoint.commit import commit, conditions_work
from cloudckpt.checksum import CRC32C
from cloudckpt.config import RetryPolicy
from cloudckpt.stores.base import ObjectInfo
from cloudckpt.transfer.retry import Retrier
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

KEY = "run/.metadata"
OURS, OLD = b"our metadata", b"the metadata before"


class Bucket(MemoryStore):
    """A store of which nobody knows whether it honours conditions, and which may ignore them.

    It looks at checksums, as a real one does.
    """

    def __init__(self, *ignored):
        super().__init__(uuid.uuid4().hex)
        self.capabilities = dataclasses.replace(self.capabilities, conditional_writes=None)
        self.ignored = ignored

    def put(self, key, body, *, checksum, if_version=None, **others):
        assert checksum == self.capabilities.checksum.of(b"".join(body))
        if ("version" if if_version else "absence") in self.ignored:
            if_version = None
        return super().put(key, body, checksum=checksum, if_version=if_version, **others)


@pytest.fixture
def store():
    return FaultyStore(Bucket())


@pytest.fixture
def retrier():
    return Retrier(RetryPolicy(attempts=4, base=0.0, cap=0.0))


def write(store, data, key=KEY, attempt="of another writer"):
    return store.inner.put(key, [memoryview(data)], checksum=CRC32C.of(data), attempt=attempt)


def held(store):
    try:
        return bytes(store.inner.get(KEY)[0])
    except errors.StoreError:
        return None


def in_its_words(error):
    """The error of a store that says itself that it has not carried out the request."""
    return functools.partial(error, certain=True)


def finish(store, baseline, retrier, *, conditional=True):
    body = [memoryview(OURS)[:5], memoryview(OURS)[5:]]
    commit(store, baseline, body, conditional=conditional, retrier=retrier)


# the beginning


def begin(look, key=KEY, **options):
    return baseline.begin(look, key, f"mem://bucket/{key}", **{"overwrite": True, **options})


def looking(store, retrier, key=KEY):
    return lambda: retrier.call(lambda: store.look(key))


def test_a_save_notes_what_is_there(store, retrier):
    assert begin(looking(store, retrier)) == Baseline(KEY, None)
    version = write(store, OLD).version
    store.fail("get_range", errors.ServerError, calls=[1, 2])
    assert begin(looking(store, retrier)) == Baseline(KEY, version)
    with pytest.raises(errors.CheckpointExistsError) as caught:
        begin(looking(store, retrier), overwrite=False)
    assert caught.value.uri == f"mem://bucket/{KEY}"
    nowhere = looking(store, retrier, "other/.metadata")
    assert begin(nowhere, "other/.metadata", overwrite=False).version is None
    store.fail("get_range", errors.AccessDeniedError)
    with pytest.raises(errors.AccessDeniedError):  # which is no empty place
        begin(looking(store, retrier))


@pytest.mark.parametrize(
    ("seconds_before_the_question", "seconds_of_the_answer", "age", "is_there"),
    [
        (0.01, 0.1, 0.0, True),  # the store's times are in seconds
        (0.01, 0.1, 500.0, True),
        (0.01, 8.0, 500.0, True),  # a store that was silent
        (0.01, 8.0, 3.0, False),
        (8.0, 0.1, 3.0, False),  # a machine that was suspended
        (8.0, 0.1, 7.5, True),
        (8.0, 0.1, None, True),  # a store that does not tell
    ],
)
def test_what_came_since_the_save_began_was_not_there_before(
    monkeypatch, seconds_before_the_question, seconds_of_the_answer, age, is_there
):
    clock = [100.0 + seconds_before_the_question]
    monkeypatch.setattr(baseline, "now", lambda: clock[0])
    answers = []

    def look():
        clock[0] += seconds_of_the_answer if not answers else 0.1
        old = None if age is None else age + 0.1 * len(answers)
        answered = None if old is None else 1000.0 + old
        answers.append(ObjectInfo(KEY, 1, "v", modified=1000.0, answered=answered))
        return answers[-1]

    if is_there:
        assert begin(look, began=100.0) == Baseline(KEY, "v")
    else:
        with pytest.raises(errors.CheckpointConflictError):
            begin(look, began=100.0)
    assert len(answers) <= 2


def test_what_comes_between_two_looks_of_a_beginning_is_no_baseline(monkeypatch):
    clock, answers = [100.0], iter([("old", 1003.0), ("new", None)])
    monkeypatch.setattr(baseline, "now", lambda: clock[0])

    def look():
        clock[0] += 8.0
        version, answered = next(answers)
        return ObjectInfo(KEY, 1, version, modified=1000.0, answered=answered)

    with pytest.raises(errors.CheckpointConflictError):
        begin(look, began=100.0)


# the commit

BEFORE = pytest.mark.parametrize("before", [None, OLD], ids=["new", "replacing"])


@BEFORE
def test_a_commit_of_which_the_server_kept_the_beginning_is_none(store, retrier, before):
    """As servers do that store what arrived before the connection broke."""
    base = Baseline(KEY, None if before is None else write(store, before).version)
    whole = store.inner.put

    def cut(key, body, *, checksum, **options):
        store.inner.put = whole
        MemoryStore.put(store.inner, key, [body[0]], checksum=checksum, **options)
        raise errors.ConnectionLostError("lost")

    store.inner.put = cut
    with pytest.raises(errors.CommitUnknownError):
        finish(store, base, retrier)


OUTCOMES = {  # of a try: what is heard of it, and whether the store carries it out
    "done": (None, True),
    "lost": (errors.ConnectionLostError, False),
    "answer lost": (errors.ConnectionLostError, True),
    "busy": (errors.ThrottledError, False),  # as load balancers say, too
    "busy, but done": (errors.ThrottledError, True),
    "turned away": (in_its_words(errors.ThrottledError), False),
    "denied": (errors.AccessDeniedError, False),
    "denied by the store": (in_its_words(errors.AccessDeniedError), False),
    "conflict": (errors.PreconditionFailedError, False),
    "conflict, but done": (errors.PreconditionFailedError, True),
}
LOOKS = {  # at what is there afterwards
    "answered": None,
    "silent": errors.ConnectionLostError,
    "denied": errors.AccessDeniedError,
    "nothing, says a gateway": errors.ObjectNotFoundError,
}
MEANWHILE = [None, (1, "theirs"), (2, "theirs"), (1, "nameless"), (1, "deleted"), (2, "deleted")]
"""Before which try somebody else does something."""


class Scripted(Bucket):
    """Does what it is told at each try of a commit; knows what it has done."""

    def __init__(self, tries, look, meanwhile):
        super().__init__()
        self._script, self._look, self._meanwhile = tries, look, meanwhile
        self.tries = self.looks = 0
        self.has_carried_out = self.is_uncertain = False

    def put(self, key, body, *, attempt="", **options):
        if attempt in ("", "of another writer"):
            return super().put(key, body, attempt=attempt, **options)
        self.tries += 1
        if self._meanwhile is not None and self._meanwhile[0] == self.tries:
            self._interfere(key, self._meanwhile[1])
        error, is_carried_out = OUTCOMES[self._script[min(self.tries, len(self._script)) - 1]]
        try:
            if is_carried_out:
                info = super().put(key, body, attempt=attempt, **options)
                self.has_carried_out = True
        except errors.PreconditionFailedError:
            if error is None:
                raise
        if error is None:
            return info
        told = error("no answer of this store")
        self.is_uncertain = self.is_uncertain or not told.certain
        raise told

    def _interfere(self, key, how):
        if how == "deleted":
            self.delete(key)
        else:
            name = "of another writer" if how == "theirs" else ""
            # the same bytes: they prove nothing
            super().put(key, [memoryview(OURS)], checksum=CRC32C.of(OURS), attempt=name)

    def head(self, key):
        self.looks += 1
        if self._look is not None:
            raise self._look("no answer of this store")
        return super().head(key)

    def there(self):
        try:
            return super().head(KEY)
        except errors.ObjectNotFoundError:
            return None


SCRIPTS = [*((one,) for one in OUTCOMES), *itertools.product(OUTCOMES, OUTCOMES)]
SCRIPTS += [("lost", "lost", "lost", last) for last in OUTCOMES]


@BEFORE
@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("look", LOOKS)
def test_whatever_befalls_a_commit_its_outcome_is_true(before, conditional, look, retrier):
    """The outcome is as good as it can be known, too: see the last two assertions."""
    for script, meanwhile in itertools.product(SCRIPTS, MEANWHILE):
        store = Scripted(script, LOOKS[look], meanwhile)
        version = None if before is None else write(FaultyStore(store), before).version
        error, baseline = None, Baseline(KEY, version)
        try:
            finish(store, baseline, retrier, conditional=conditional)
        except errors.CloudCheckpointError as raised:
            error = raised
        case, there = (script, meanwhile, error), store.there()
        is_ours = there is not None and there.attempt not in ("", "of another writer")
        has_moved = (None if there is None else there.version) != version
        if error is None:
            assert store.has_carried_out, case
            assert is_ours or store.tries > 1, case
            assert store.looks == 0 or store.is_uncertain, case
        else:
            assert error.uri == store.uri(KEY) or not isinstance(
                error, (errors.CommitUnknownError, errors.CheckpointConflictError)
            ), case
        if isinstance(error, errors.CommitUnknownError):
            assert store.is_uncertain, case
        elif error is not None:
            assert not is_ours, case
            is_proven = conditional and look == "answered" and has_moved
            assert not store.is_uncertain or is_proven, case
            assert store.looks == 0 or store.is_uncertain, case
            assert store.tries == 4 or not isinstance(error, errors.ThrottledError), case
        if look == "answered" and is_ours:
            assert error is None, case
        if isinstance(error, errors.CheckpointConflictError):
            assert isinstance(error.__cause__, errors.PreconditionFailedError), case
        if (
            isinstance(getattr(error, "__cause__", None), errors.PreconditionFailedError)
            and conditional
        ):
            is_named = there is None or there.attempt
            if not store.is_uncertain or (look == "answered" and has_moved and is_named):
                assert isinstance(error, errors.CheckpointConflictError), case


@pytest.mark.parametrize("is_certain", [True, False])
def test_a_check_that_fails_before_a_second_try_ends_the_commit(store, retrier, is_certain):
    """As another job's claim does; whether the first try may have succeeded decides the error."""
    tries = []

    def check():
        tries.append(1)
        if len(tries) > 1:
            raise errors.CheckpointConflictError("another job has started")

    store.fail("put", in_its_words(errors.ThrottledError) if is_certain else errors.ThrottledError)
    error = errors.CheckpointConflictError if is_certain else errors.CommitUnknownError
    body = [memoryview(OURS)]
    with pytest.raises(error):
        commit(store, Baseline(KEY, None), body, conditional=True, retrier=retrier, check=check)
    assert len(tries) == 2


@BEFORE
def test_where_metadata_are_dropped_a_commit_whose_answer_was_lost_is_unknown(retrier, before):
    class Dropping(Bucket):
        def put(self, key, body, *, attempt, **others):
            return super().put(key, body, **others)

    store = FaultyStore(Dropping())
    version = None if before is None else write(store, before).version
    finish(store, Baseline(KEY, version), retrier, conditional=False)  # which needs no proof
    store.fail("put", errors.ConnectionLostError, when="after")
    with pytest.raises(errors.CommitUnknownError):
        finish(store, Baseline(KEY, store.inner.head(KEY).version), retrier)
    assert held(store) == OURS


# whether conditions work

TRIED = "run/.conditions"


def trial(store, retrier, setting="auto"):
    return conditions_work(store, setting, TRIED, retrier)


def nothing_is_left(store):
    return list(store.inner.list(TRIED)) == []


def test_a_store_that_honours_conditions_is_found_out_once(store, retrier):
    assert trial(store, retrier)
    asked = store.calls.total()
    assert asked > 0
    assert trial(store, retrier)
    assert store.calls.total() == asked
    assert nothing_is_left(store)


class Forgetful(Bucket):
    """Never finds that an object has the version that it has."""

    def put(self, key, body, *, if_version=None, **others):
        return super().put(key, body, if_version=if_version and "no version at all", **others)


class Refusing(Bucket):
    """Knows no conditions."""

    def put(self, key, body, *, if_version=None, **others):
        if if_version is not None:
            raise errors.InvalidRequestError("no such header")
        return super().put(key, body, **others)


@pytest.mark.parametrize(
    "bucket",
    [
        *(Bucket("absence"), Bucket("version"), Bucket("absence", "version")),
        *(Forgetful(), Refusing()),
    ],
)
def test_a_store_that_does_not_honour_conditions_is_found_out(retrier, bucket):
    store = FaultyStore(bucket)
    for _ in range(2):
        with pytest.raises(errors.ConfigError, match="conditional_writes='off'"):
            trial(store, retrier)
    assert nothing_is_left(store)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_fault_during_the_trial_is_no_verdict(store, retrier, call, when):
    store.fail("put", errors.ConnectionLostError, calls=[call], when=when)
    assert trial(store, retrier)


def test_a_store_that_does_not_answer_is_not_judged(store, retrier):
    store.fail("put", errors.ConnectionLostError)
    with pytest.raises(errors.ConnectionLostError):
        trial(store, retrier)
    store.heal()
    assert trial(store, retrier)


def test_what_the_vendor_documents_or_the_user_says_is_believed(store, retrier, caplog):
    assert trial(store, retrier, "on")
    with caplog.at_level(logging.WARNING, "cloudckpt"):
        assert not trial(store, retrier, "off")
    assert "concurrent writers" in caplog.text
    store.capabilities = dataclasses.replace(store.capabilities, conditional_writes=True)
    assert trial(store, retrier)
    store.capabilities = dataclasses.replace(store.capabilities, conditional_writes=False)
    with pytest.raises(errors.ConfigError):
        trial(store, retrier)
    assert store.calls.total() == 0

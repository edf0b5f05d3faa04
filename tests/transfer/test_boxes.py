"""Boxes of tensors and the requests for them: every byte once, few requests, little waste."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cloudckpt.transfer.boxes import plan_boxes, row_major_slices, row_major_strides
from cloudckpt.transfer.download import pack_requests
from cloudckpt.transfer.landing import BytesSink, Segment, StoredBytes, Wanted

KIB, MIB = 1024, 1024 * 1024

ITEMSIZES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@st.composite
def regions(draw):
    """``(shape, offsets, lengths)`` of a region of a tensor of up to 4 dimensions."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    lengths = [
        # whole dimensions are what makes rows contiguous, and would seldom come by chance
        draw(st.integers(1, size - offset) | st.just(size - offset))
        for size, offset in zip(shape, offsets, strict=True)
    ]
    return shape, offsets, lengths


def stored(shape, itemsize):
    """A tensor whose elements are all different, as far as the type goes."""
    return np.arange(math.prod(shape), dtype=ITEMSIZES[itemsize]).reshape(shape)


def part(tensor, offsets, lengths):
    """A view of a part of a tensor; also of one without dimensions."""
    places = [slice(at, at + length) for at, length in zip(offsets, lengths, strict=True)]
    return tensor[(*places, ...)]


def box_of(tensor, box):
    return part(tensor, [start for start, _ in box], [length for _, length in box])


@settings(max_examples=200)
@example(region=([3, 4], [0, 3], [3, 1]), itemsize=1, limit=5, merge_gap=100)
@given(
    region=regions(),
    itemsize=st.sampled_from(sorted(ITEMSIZES)),
    limit=st.integers(1, 600) | st.just(10**6),
    merge_gap=st.integers(0, 200) | st.just(10**6),
)
def test_planned_reads_make_the_region_within_the_limits(region, itemsize, limit, merge_gap):
    shape, offsets, lengths = region
    source = stored(shape, itemsize)
    raw = source.tobytes()
    target, times = np.zeros(lengths, source.dtype), np.zeros(lengths, int)
    wanted = np.zeros(shape, bool)
    part(wanted, offsets, lengths)[...] = True
    strides = [stride * itemsize for stride in row_major_strides(shape)]
    reads = list(plan_boxes(shape, offsets, lengths, itemsize, limit=limit, merge_gap=merge_gap))
    for read in reads:
        assert 0 <= read.start < read.stop <= len(raw)
        elements = np.frombuffer(raw[read.start : read.stop], source.dtype)
        into = box_of(target, read.box)
        assert read.contiguous == (elements.size == into.size)
        if read.contiguous:
            into[...] = elements.reshape(into.shape)
        else:
            assert elements.nbytes <= limit
            into[...] = np.lib.stride_tricks.as_strided(elements, into.shape, strides)
        box_of(times, read.box)[...] += 1
        inside = wanted.reshape(-1)[read.start // itemsize : read.stop // itemsize]
        assert inside[0]
        assert inside[-1]
        gaps = [len(list(run)) for value, run in itertools.groupby(inside) if not value]
        assert all(gap * itemsize <= merge_gap for gap in gaps)
    assert (times == 1).all()
    assert (target == part(source, offsets, lengths)).all()
    assert all(one.stop <= next.start for one, next in itertools.pairwise(reads))
    # what lies near enough is one read if the limit allows
    places = np.flatnonzero(wanted.reshape(-1))
    extent = int(places[-1] - places[0] + 1) * itemsize
    largest_gap = int(np.diff(places, prepend=places[0] - 1).max() - 1) * itemsize
    assert len(reads) == 1 or largest_gap > merge_gap or extent > limit


@pytest.mark.parametrize(
    ("shape", "offsets", "lengths"),
    [([0], [0], [0]), ([3, 0, 2], [0, 0, 0], [3, 0, 2]), ([4, 4], [1, 4], [2, 0])],
)
def test_nothing_is_read_for_nothing(shape, offsets, lengths):
    assert list(plan_boxes(shape, offsets, lengths, 4, limit=100, merge_gap=0)) == []


# slices


@given(
    shape=st.lists(st.integers(0, 7), max_size=4),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    limit=st.integers(1, 400),
)
def test_slices_cover_a_tensor_once_in_row_major_order(shape, itemsize, limit):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    seen = []
    for part in row_major_slices(shape, itemsize, limit):
        elements = numbers[(*(slice(at, at + length) for at, length in part.box), ...)].reshape(-1)
        assert (part.start, part.stop) == (elements[0] * itemsize, (elements[-1] + 1) * itemsize)
        assert elements.size * itemsize <= max(limit, itemsize)
        assert (np.diff(elements) == 1).all()
        assert part.contiguous
        seen.append(elements)
    assert np.concatenate([np.array([], int), *seen]).tolist() == list(range(numbers.size))


# requests


GRAINS = st.just(0) | st.integers(1, 60)
GAPS = st.integers(0, 80)


def segment(start, stop, grain, origin, name):
    raw = StoredBytes("object", origin, 0, None, None, str(name))
    return Segment(Wanted(raw, 0, 0, BytesSink(0), grain > 0), start, stop, grain)


def name(segment):
    return segment.want.source.item


def origin(segment):
    return segment.want.source.offset


@st.composite
def segments_of_one(draw, *, grains=GRAINS, gaps=GAPS):
    """Segments of one object, in any order; those with negative gaps overlap."""
    segments, at = [], draw(st.integers(0, 1000))
    for owner in range(draw(st.integers(0, 10))):
        at = max(0, at + draw(gaps))
        length = draw(st.integers(1, 400))
        back = draw(st.integers(0, 30))
        segments.append(segment(at, at + length, draw(grains), at - back, owner))
        at += length
    return draw(st.permutations(segments))


@settings(max_examples=200)
@given(
    segments=segments_of_one() | segments_of_one(gaps=st.integers(-600, 80)),
    limit=st.integers(1, 500),
    merge_gap=st.integers(0, 100),
)
def test_requests_have_each_segment_whole_and_exceed_no_limit(segments, limit, merge_gap):
    by_name, pieces = {name(one): one for one in segments}, {}
    for request in pack_requests(segments, limit=limit, merge_gap=merge_gap):
        assert request
        for one, following in itertools.pairwise(request):
            assert 0 <= following.start - one.stop <= merge_gap
        for piece in request:
            pieces.setdefault(name(piece), []).append(piece)
            one = by_name[name(piece)]
            for place in {piece.start, piece.stop} - {one.start, one.stop}:  # cut at its grain
                assert one.grain > 0
                assert (place - origin(one)) % one.grain == 0
        if request[-1].stop - request[0].start > limit:  # one segment that can't be cut
            (piece,) = request
            if piece.grain:
                within = (piece.start + limit - origin(piece)) // piece.grain
                assert origin(piece) + within * piece.grain <= piece.start
    assert pieces.keys() == by_name.keys()
    for one in segments:
        found = pieces[name(one)]
        assert (found[0].start, found[-1].stop) == (one.start, one.stop)
        assert all(one.stop == next.start for one, next in itertools.pairwise(found))
        assert all(piece.start < piece.stop for piece in found)


@settings(max_examples=200)
@given(
    segments=segments_of_one(grains=st.integers(1, 60), gaps=st.just(0)),
    limit=st.integers(360, 3000),
    merge_gap=st.integers(0, 100),
)
def test_a_run_that_can_be_cut_takes_few_requests(segments, limit, merge_gap):
    """With grains of at most a sixth of the limit: no more than a fifth too many."""
    total = sum(one.stop - one.start for one in segments)
    requests = list(pack_requests(segments, limit=limit, merge_gap=merge_gap))
    assert len(requests) <= math.ceil(total / limit) * 1.2 + 1


def test_a_billion_bytes_are_planned_quickly():
    """Large segments are cut as the requests are asked for, not in advance."""
    segments = [segment(0, 1 << 50, MIB, 0, 0)]
    first = next(pack_requests(segments, limit=16 * MIB, merge_gap=0))
    assert (first[0].start, first[0].stop) == (0, 16 * MIB)

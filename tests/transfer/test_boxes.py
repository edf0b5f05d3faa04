"""Boxes of tensors and the requests for them: every byte once, few requests, little waste."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cloudckpt.transfer.boxes import are_apart, plan_boxes, row_major_slices, row_major_strides
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


PLANS = {
    "region": regions(),
    "itemsize": st.sampled_from(sorted(ITEMSIZES)),
    "limit": st.integers(1, 600) | st.just(10**6),
    "merge_gap": st.integers(0, 200) | st.just(10**6),
}


def planned(region, itemsize, limit, merge_gap):
    shape, offsets, lengths = region
    return list(plan_boxes(shape, offsets, lengths, itemsize, limit=limit, merge_gap=merge_gap))


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
@given(**PLANS)
def test_reading_what_is_planned_makes_the_region(region, itemsize, limit, merge_gap):
    shape, offsets, lengths = region
    source = stored(shape, itemsize)
    raw = source.tobytes()
    target, times = np.zeros(lengths, source.dtype), np.zeros(lengths, int)
    strides = [stride * itemsize for stride in row_major_strides(shape)]
    for read in planned(region, itemsize, limit, merge_gap):
        assert 0 <= read.start < read.stop <= len(raw)
        elements = np.frombuffer(raw[read.start : read.stop], source.dtype)
        into = box_of(target, read.box)
        if read.contiguous:
            into[...] = elements.reshape(into.shape)
        else:
            into[...] = np.lib.stride_tricks.as_strided(elements, into.shape, strides)
        box_of(times, read.box)[...] += 1
    assert (times == 1).all()
    assert (target == part(source, offsets, lengths)).all()


@settings(max_examples=200)
@given(**PLANS)
def test_a_contiguous_read_is_its_box_and_any_other_keeps_the_limit(
    region, itemsize, limit, merge_gap
):
    for read in planned(region, itemsize, limit, merge_gap):
        nbytes = math.prod(length for _, length in read.box) * itemsize
        if read.contiguous:
            assert read.stop - read.start == nbytes
        else:
            assert read.stop - read.start <= limit


@example(region=([3, 4], [0, 3], [3, 1]), itemsize=1, limit=5, merge_gap=100)
@given(**PLANS)
def test_a_read_without_other_bytes_is_contiguous(region, itemsize, limit, merge_gap):
    for read in planned(region, itemsize, limit, merge_gap):
        nbytes = math.prod(length for _, length in read.box) * itemsize
        assert read.contiguous == (read.stop - read.start == nbytes)


@settings(max_examples=200)
@given(**PLANS)
def test_no_read_goes_through_more_unneeded_bytes_than_merge_gap(
    region, itemsize, limit, merge_gap
):
    """Within one read, between two wanted elements: no longer run of others than ``merge_gap``."""
    shape, offsets, lengths = region
    wanted = np.zeros(shape, bool)
    part(wanted, offsets, lengths)[...] = True
    flat = wanted.reshape(-1)
    for read in planned(region, itemsize, limit, merge_gap):
        inside = flat[read.start // itemsize : read.stop // itemsize]
        assert inside[0]
        assert inside[-1]
        runs = [len(list(run)) for value, run in itertools.groupby(inside) if not value]
        assert all(run * itemsize <= merge_gap for run in runs)


@settings(max_examples=200)
@given(**PLANS)
def test_reads_come_in_the_order_of_bytes_and_do_not_overlap(region, itemsize, limit, merge_gap):
    reads = planned(region, itemsize, limit, merge_gap)
    assert all(one.stop <= next.start for one, next in itertools.pairwise(reads))


@settings(max_examples=200)
@given(**PLANS)
def test_what_lies_near_enough_is_one_read_if_the_limit_allows(region, itemsize, limit, merge_gap):
    shape, offsets, lengths = region
    wanted = np.zeros(shape, bool)
    part(wanted, offsets, lengths)[...] = True
    places = np.flatnonzero(wanted.reshape(-1))
    extent = int(places[-1] - places[0] + 1) * itemsize
    largest_gap = int(np.diff(places, prepend=places[0] - 1).max() - 1) * itemsize
    assume(largest_gap <= merge_gap and extent <= limit)
    assert len(planned(region, itemsize, limit, merge_gap)) == 1


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
        assert (part.start, part.stop) == (
            elements[0] * itemsize,
            (elements[-1] + 1) * itemsize,
        )
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
def neighbours(draw, *, grains=GRAINS, gaps=GAPS):
    """Segments of one object that do not overlap, in any order."""
    segments, at = [], draw(st.integers(0, 1000))
    for owner in range(draw(st.integers(0, 10))):
        at += draw(gaps)
        length = draw(st.integers(1, 400))
        back = draw(st.integers(0, 30))
        segments.append(segment(at, at + length, draw(grains), at - back, owner))
        at += length
    return draw(st.permutations(segments))


@st.composite
def any_segments(draw):
    segments = []
    for owner in range(draw(st.integers(0, 10))):
        start, length = draw(st.integers(0, 800)), draw(st.integers(1, 400))
        grain, back = draw(GRAINS), draw(st.integers(0, 30))
        segments.append(segment(start, start + length, grain, start - back, owner))
    return segments


PACKINGS = {
    "segments": neighbours() | any_segments(),
    "limit": st.integers(1, 500),
    "merge_gap": st.integers(0, 100),
}


@settings(max_examples=200)
@given(**PACKINGS)
def test_the_pieces_of_a_segment_are_the_segment(segments, limit, merge_gap):
    requests = list(pack_requests(segments, limit=limit, merge_gap=merge_gap))
    pieces = {}
    for piece in itertools.chain(*requests):
        pieces.setdefault(name(piece), []).append(piece)
    assert pieces.keys() == {name(one) for one in segments}
    for one in segments:
        found = pieces[name(one)]
        assert (found[0].start, found[-1].stop) == (one.start, one.stop)
        assert all(one.stop == next.start for one, next in itertools.pairwise(found))
        assert all(piece.start < piece.stop for piece in found)


@settings(max_examples=200)
@given(**PACKINGS)
def test_a_segment_is_cut_at_its_grain_alone(segments, limit, merge_gap):
    by_name = {name(one): one for one in segments}
    for piece in itertools.chain(*pack_requests(segments, limit=limit, merge_gap=merge_gap)):
        one = by_name[name(piece)]
        for place in {piece.start, piece.stop} - {one.start, one.stop}:
            assert one.grain > 0
            assert (place - origin(one)) % one.grain == 0


@settings(max_examples=200)
@given(**PACKINGS)
def test_the_pieces_of_a_request_follow_each_other_within_merge_gap(segments, limit, merge_gap):
    for request in pack_requests(segments, limit=limit, merge_gap=merge_gap):
        assert request
        for one, following in itertools.pairwise(request):
            assert 0 <= following.start - one.stop <= merge_gap


@settings(max_examples=200)
@given(**PACKINGS)
def test_a_request_exceeds_the_limit_only_for_one_segment_that_can_not_be_cut(
    segments, limit, merge_gap
):
    for request in pack_requests(segments, limit=limit, merge_gap=merge_gap):
        if request[-1].stop - request[0].start <= limit:
            continue
        assert len(request) == 1
        (piece,) = request
        if piece.grain:
            within = (piece.start + limit - origin(piece)) // piece.grain
            assert origin(piece) + within * piece.grain <= piece.start


@settings(max_examples=200)
@given(
    segments=neighbours(grains=st.integers(1, 60), gaps=st.just(0)),
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


@given(st.data(), st.integers(0, 3))
def test_boxes_are_apart_if_no_element_is_in_two(data, dims):
    ranges = st.tuples(st.integers(0, 5), st.integers(0, 3))
    boxes = data.draw(st.lists(st.tuples(*[ranges] * dims), max_size=6))
    elements = [
        element
        for box in boxes
        for element in itertools.product(*(range(at, at + length) for at, length in box))
    ]
    assert are_apart(boxes) == (len(set(elements)) == len(elements))

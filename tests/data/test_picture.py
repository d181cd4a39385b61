"""The picture of a federation, and the number of its label skew."""

import pytest
import torch
from entry_points import sentence, synthetic_clusters, synthetic_linear
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from pflcore import Federation

matrices = st.integers(1, 5).flatmap(
    lambda classes: st.lists(
        st.lists(st.integers(0, 9), min_size=classes, max_size=classes).filter(any),
        min_size=1,
        max_size=6,
    )
)


def labelled(counts, names=None):
    """A federation in which client i has counts[i][c] samples of class c."""
    y = []
    index = []
    for row in counts:
        labels = [c for c, count in enumerate(row) for _ in range(count)]
        index.append(torch.arange(len(y), len(y) + len(labels)))
        y += labels
    classes = len(counts[0])
    y = torch.tensor(y)
    return Federation(torch.zeros(len(y), 1), y, {"train": index}, classes, names=names)


def dots(figure):
    """From (client, row) to the area of the dot there."""
    (axis,) = figure.axes
    drawn = axis.collections[-1]
    places = [tuple(place) for place in drawn.get_offsets().tolist()]
    return dict(zip(places, drawn.get_sizes().tolist(), strict=True))


@examples(4)
@given(matrices)
def test_areas_are_proportional_to_counts(counts):
    pytest.importorskip("matplotlib")

    areas = dots(labelled(counts).plot())

    want = {
        (i, c): count
        for i, row in enumerate(counts)
        for c, count in enumerate(row)
        if count
    }
    assert areas.keys() == want.keys()
    largest = max(want, key=want.get)
    for place, count in want.items():
        share = areas[place] / areas[largest]
        assert share == pytest.approx(count / want[largest], rel=1e-5)


@given(matrices)
def test_label_skew_is_a_distance(counts):
    skew = labelled(counts).label_skew()

    assert 0 <= skew < 1
    assert labelled(counts[::-1]).label_skew() == pytest.approx(skew)
    # Twice the samples are the same shares.
    assert labelled([[2 * c for c in row] for row in counts]).label_skew() == (
        pytest.approx(skew)
    )
    assert labelled([counts[0]] * 3).label_skew() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "counts, want",
    [
        ([[4, 0], [0, 9]], 1 / 2),
        ([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], 3 / 4),
        ([[1, 1], [3, 1]], 1 / 8),
    ],
)
def test_label_skew_by_hand(counts, want):
    fed = labelled(counts)
    assert fed.label_skew() == pytest.approx(want)
    assert f"label skew: {want:.2f}" in fed.summary()


def test_label_skew_needs_labels():
    fed = synthetic_linear(n=2, samples=3)
    assert "label skew" not in fed.summary()
    with sentence("counts: expected labels"):
        fed.label_skew()


@pytest.mark.deep("it takes a second")
def test_axes_and_title_say_what_is_drawn():
    pytest.importorskip("matplotlib")
    fed = labelled([[3, 0], [0, 1]], names=("north", "south"))

    (axis,) = fed.plot().axes

    assert axis.get_title() == "data: 2 clients, 4 train samples"
    assert [t.get_text() for t in axis.get_xticklabels()] == ["north", "south"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("client", "class")


def test_numbers_are_drawn_in_bins_of_equal_width():
    pytest.importorskip("matplotlib")
    y = [torch.tensor([0.0, 0.1, 10.0]), torch.tensor([9.9, 5.0])]
    fed = Federation.from_clients([(torch.zeros(len(v), 1), v) for v in y])

    figure = fed.plot()

    assert set(dots(figure)) == {(0, 0.25), (0, 9.75), (1, 9.75), (1, 5.25)}
    assert dots(figure)[0, 0.25] == pytest.approx(2 * dots(figure)[1, 5.25])
    (axis,) = figure.axes
    assert axis.get_ylabel() == "target" and axis.get_ylim() == (0, 10)


def test_equal_numbers_are_one_bin():
    pytest.importorskip("matplotlib")
    fed = Federation.from_clients([(torch.zeros(2, 1), torch.full((2,), 3.5))] * 2)
    assert len(dots(fed.plot())) == 2


def test_targets_of_several_numbers_show_sizes():
    pytest.importorskip("matplotlib")
    fed = Federation.from_clients(
        [(torch.zeros(n, 1), torch.rand(n, 2)) for n in (3, 1)]
    )

    (axis,) = fed.plot().axes

    assert [bar.get_height() for bar in axis.patches] == [3, 1]


def test_of_many_clients_the_first_are_drawn():
    pytest.importorskip("matplotlib")
    fed = synthetic_clusters(n=230, samples=4, held_out=1)

    figure = fed.plot("test")

    assert max(client for client, _ in dots(figure)) == 199
    title = figure.axes[0].get_title()
    assert title.endswith("230 test samples (the first 200 of 230 clients)")


def test_a_split_without_samples_is_named():
    with sentence("split: expected one of train, got 'val'"):
        labelled([[1]]).plot("val")

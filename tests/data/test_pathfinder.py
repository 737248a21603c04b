"""Generated Pathfinder images: in figures like the released ones, and the same wherever they are made."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np
import pytest

from flashtrain.data.pathfinder import PRESETS, PathfinderImages, generate, spec_of
from flashtrain.data.pathfinder.images import Geometry, geometry, stream_key
from flashtrain.data.pathfinder.statistics import (
    count_components,
    image_statistics,
    marker_distances,
    shortcut_accuracy,
)
from flashtrain.data.pathfinder.strokes import dashes

COUNTS = {"lra32": 2000, "lra64": 400, "lra128": 400, "lra256": 60, "documented32": 1000, "documented256": 60}

# (images, then mean, std, shares of pixels > 0, > 25, > 64, > 127 and = 255, components), measured on genuine images of
# the Long Range Arena and on ones made by the original generator.
MEASURED = {
    "genuine Path-X": ("lra128", 8, "0.0370 0.1416 0.161 0.0785 0.0519 0.0392 0.00011 87.2"),
    "original at 128, corrected": ("lra128", 32, "0.0369 0.1420 0.159 0.0778 0.0526 0.0394 0.00012 85.5"),
    "rewritten at 128, corrected": ("lra128", 200, "0.0370 0.1422 0.160 0.0784 0.0523 0.0394 0.00012 85.6"),
    "genuine Pathfinder-64": ("lra64", 8, "0.0633 0.1738 0.266 0.1387 0.1086 0.0581 0.00046 17.9"),
    "original at 64, corrected": ("lra64", 24, "0.0611 0.1702 0.267 0.1353 0.1046 0.0546 0.00049 23.4"),
    "rewritten at 64, corrected": ("lra64", 200, "0.0632 0.1726 0.276 0.1402 0.1080 0.0566 0.00049 23.7"),
    "original at 32, corrected": ("lra32", 60, "0.0941 0.2255 0.392 0.1652 0.1407 0.1028 0.0045 14.4"),
    "original at 256, corrected": ("lra256", 20, "0.0166 0.113 0.051 0.0252 0.0209 0.016 0.0053 86.8"),
    "original at 128, as documented": ("documented128", 60, "0.0311 0.1402 0.137 0.0567 0.0405 0.0304 0.00073 57.8"),
    "original at 64, as documented": ("documented64", 50, "0.0528 0.1622 0.263 0.1131 0.0892 0.0461 0.0025 17.2"),
    "original at 32, as documented": ("documented32", 200, "0.0792 0.2000 0.344 0.1527 0.1260 0.0849 0.0022 14.0"),
    "original at 256, as documented": ("documented256", 12, "0.0116 0.095 0.039 0.0171 0.0141 0.011 0.0034 56.0"),
}


@cache
def sample(preset: str) -> PathfinderImages:
    return generate(spec_of(preset), 0, "test", 0, COUNTS.get(preset, 200), targets=True)


@cache
def figures(preset: str) -> dict[str, np.ndarray]:
    return image_statistics(sample(preset).images)


def geometries(preset: str, count: int, **changes: Any) -> list[Geometry]:
    spec = spec_of(preset, **changes)
    key = stream_key(spec, 0, "test")
    return [geometry(spec, key, index) for index in range(count)]


def orientations(found: Geometry, contour: np.ndarray) -> np.ndarray:
    return found.dashes.orientations[contour[:, 2]]


@pytest.mark.parametrize("row", MEASURED)
def test_pixel_statistics_are_those_of_the_original_within_three_standard_errors(row: str) -> None:
    preset, count, text = MEASURED[row]
    for expected, (name, values) in zip(text.split(), figures(preset).items(), strict=True):
        # Often all images have equally many white pixels; measured ones differ by one here and there.
        spread = max(values.std(), 1 / PRESETS[preset].side ** 2)
        error = spread * np.sqrt(1 / len(values) + 1 / count)
        rounding = 0.5 * 10.0 ** -len(expected.partition(".")[2])
        assert abs(values.mean() - float(expected)) <= 3 * error + rounding, name


@pytest.mark.parametrize("preset", ["lra32", "lra64", "lra128"])
def test_labels_are_a_fair_coin_that_no_pixel_statistic_gives_away(preset: str) -> None:
    labels = sample(preset).labels
    assert abs(labels.mean() - 0.5) <= 1.5 / np.sqrt(len(labels))
    for name in ("mean", "std", "above_64", "components"):
        one, zero = (figures(preset)[name][labels == label] for label in (1, 0))
        assert abs(one.mean() - zero.mean()) <= 3 * np.sqrt(one.var() / len(one) + zero.var() / len(zero)), name


def test_path_x_draws_most_of_its_17_distractors_and_never_more() -> None:
    drawn = [len(found.distractors) for found in geometries("lra128", 300)]
    assert spec_of("lra128").distractor_count == max(drawn) == 17
    assert np.mean(drawn) >= 14.5
    assert figures("lra128")["components"].max() <= 2 * 14 + 17 * 4


def test_dashes_follow_each_other_by_one_length_and_two_margins_and_turn_by_at_most_50_degrees() -> None:
    margins, turns = set(), []
    for found in geometries("lra128", 100):
        margins.add(found.margin)
        for contour in (*found.contours, *found.distractors):
            angle = orientations(found, contour)
            direction = np.stack([np.sin(angle), np.cos(angle)], axis=1)
            heads = contour[1:, :2]  # from here to the next pivot is a margin, from there to its head margin and dash
            expected = heads[:-1] + found.margin * direction[1:-1] + (found.margin + 5) * direction[2:]
            assert np.abs(heads[1:] - expected).max() <= 2.5  # moves are in whole pixels, rounded up
            turns.append(np.abs((np.diff(angle) + np.pi) % (2 * np.pi) - np.pi))
    assert margins == {2, 3}  # so that steps are 5 + 2 * 2 = 9 or 5 + 2 * 3 = 11 px
    assert 45 < np.degrees(np.concatenate(turns).max()) <= 50


def test_contours_start_in_the_middle_of_path_x_and_20_px_apart() -> None:
    starts = np.array([found.contours[:, 0, :2] for found in geometries("lra128", 300)])
    assert starts[:, 0].min() >= 40
    assert starts[:, 0].max() < 88
    assert np.abs(marker_distances(starts) - 20).max() <= 0.75


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"documented32"}))  # there dashes outshine the discs
def test_both_discs_have_a_white_pixel(preset: str) -> None:
    made = sample(preset)
    for image, markers in zip(made.images, made.markers, strict=True):
        for y, x in np.maximum(markers - 3, 0):
            assert image[y : y + 7, x : x + 7].max() == 255


def widened(mask: np.ndarray) -> np.ndarray:
    """Each pixel set where one of its nine neighbours is."""
    height, width = mask.shape
    padded = np.pad(mask, 1)
    return np.logical_or.reduce([padded[y : y + height, x : x + width] for y in range(3) for x in range(3)])


def test_the_label_is_whether_a_line_leads_from_disc_to_disc() -> None:
    spec = spec_of("lra256", contour_length=6, distractor_count=0)
    made = generate(spec, 0, "test", 0, 60)
    joined = []
    for image, (start, end) in zip(made.images, made.markers, strict=True):
        line = image > 64
        for _ in range(3):  # gaps are of 6 px
            line = widened(line)
        reached = np.zeros_like(line)
        reached[tuple(start)] = True
        while (further := widened(reached) & line).sum() > reached.sum():
            reached = further
        joined.append(reached[tuple(end)])
    assert np.array(joined)[made.labels == 1].all()
    assert np.array(joined)[made.labels == 0].mean() < 0.7  # the others often touch


def test_a_disc_has_the_measured_grey_levels() -> None:
    spec = spec_of("lra64", distractor_count=0)
    made = generate(spec, 0, "test", 0, 100)
    y, x = made.markers[:, 0].T
    inside = np.array([made.images[np.arange(100), y + dy, x + dx] for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0))])
    assert ((inside >= 210) & (inside <= 226)).mean() > 0.8  # a dash may be brighter


@pytest.mark.parametrize(
    ("preset", "margin", "usable"),
    [
        ("lra32", 1, [(-150, -121)]),
        ("lra64", 1, [(-180, -136), (-134, -85)]),
        ("lra128", 2, [(-180, -60), (-53, 179)]),
        ("lra128", 3, [(-180, 179)]),
        ("lra256", 3, [(-180, 179)]),
    ],
)
def test_the_seeding_flaw_leaves_the_orientations_of_the_original(
    preset: str, margin: int, usable: list[tuple[int, int]]
) -> None:
    expected = [degree for first, last in usable for degree in range(first, last + 1)]
    assert (np.flatnonzero(dashes(spec_of(preset), margin).usable) - 180).tolist() == expected
    assert dashes(spec_of(preset, seeding_flaw=False), margin).usable.all()
    found = geometries(preset, 40)
    drawn = {int(contour[0, 2]) - 180 for one in found for contour in (one.contours[0], *one.distractors)}
    assert drawn <= set(expected) or len(PRESETS[preset].margins) > 1


def test_without_the_seeding_flaw_distractors_find_their_place() -> None:
    flawed, clean = (
        np.mean([len(found.distractors) for found in geometries("lra32", 300, seeding_flaw=flaw)])
        for flaw in (True, False)
    )
    assert flawed < 3 < 5 < clean


@pytest.mark.parametrize(
    ("preset", "same", "different"),
    [
        ("lra32", (13.3, 5.1), (12.8, 5.1)),
        ("lra64", (32.7, 9.9), (29.6, 9.8)),
        ("lra128", (75.9, 18.5), (74.0, 20.3)),
        ("lra256", (124.4, 19.1), (125.8, 26.2)),
    ],
)
def test_discs_are_as_far_apart_as_in_the_original(
    preset: str, same: tuple[float, float], different: tuple[float, float]
) -> None:
    found = np.array([one.contours[:, [0, -1], :2] for one in geometries(preset, 400, distractor_count=0)])
    for ends, (mean, spread) in ((found[:, :, 1], same), (found[:, ::-1, 1], different)):
        distances = np.linalg.norm(found[:, :, 0] - ends, axis=-1).mean(axis=1)  # two a pair of contours
        assert abs(distances.mean() - mean) <= 3 * spread * np.sqrt(1 / 400 + 1 / 2000) + 0.05


def test_the_distance_of_the_discs_says_something_at_256_and_little_at_32() -> None:
    accuracies = {}
    for preset in ("lra32", "lra256"):
        found = geometries(preset, 4000, distractor_count=0)
        tips = np.array([(one.contours[one.start, 0, :2], one.contours[one.end, -1, :2]) for one in found])
        accuracies[preset] = shortcut_accuracy(marker_distances(tips), np.array([one.label for one in found]))
    assert 0.58 <= accuracies["lra256"] <= 0.64
    assert 0.50 <= accuracies["lra32"] <= 0.56


def test_the_shortcut_is_not_flattered_by_few_images() -> None:
    rng = np.random.default_rng(0)
    noise = [shortcut_accuracy(rng.random(100), rng.integers(0, 2, 100)) for _ in range(200)]
    assert np.mean(noise) == pytest.approx(0.5, abs=0.01)
    labels = rng.integers(0, 2, 2000)
    assert shortcut_accuracy(labels + 0.1 * rng.random(2000), labels) == 1


def test_components_are_joined_over_corners_and_along_spirals() -> None:
    spiral = np.array([[1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0]], dtype=bool)
    assert count_components(spiral) == 1
    spiral[0, 1] = spiral[3, 0] = False
    assert count_components(spiral) == 3
    assert count_components(np.zeros((3, 3), dtype=bool)) == 0


def test_an_image_is_the_same_alone_and_in_any_chunk_with_and_without_targets() -> None:
    spec = spec_of("lra32")
    made = generate(spec, 3, "train", 10, 20, targets=True)
    for first, count in ((10, 1), (17, 1), (5, 13), (29, 40)):
        again = generate(spec, 3, "train", first, count)
        rows = [index for index in range(first, first + count) if 10 <= index < 30]
        for part in ("images", "labels", "markers"):
            here, there = getattr(made, part), getattr(again, part)
            assert all(np.array_equal(here[index - 10], there[index - first]) for index in rows)
    assert again.targets is None


def test_another_index_seed_split_or_spec_is_another_image() -> None:
    spec = spec_of("lra32")
    sets = [generate(spec, seed, split, 0, 700).images for seed in (0, 1) for split in ("train", "val", "test")]
    sets.append(generate(spec_of("lra32", seeding_flaw=False), 0, "train", 0, 700).images)
    images = np.concatenate(sets)
    assert len({image.tobytes() for image in images}) == len(images)


def test_the_same_image_is_made_in_every_process_and_release() -> None:
    made = generate(spec_of("lra32"), 0, "train", 0, 8)
    assert made.labels.tolist() == [1, 1, 0, 1, 1, 1, 0, 1]
    assert made.markers[0].tolist() == [[11, 20], [20, 8]]


def test_targets_count_the_discs_on_each_contour() -> None:
    for preset in ("lra128", "lra32"):
        made = sample(preset)
        assert made.targets is not None
        for label, values in ((0, {0, 1, 2}), (1, {0, 1, 3})):
            targets = made.targets[made.labels == label]
            assert {int(value) for value in np.unique(targets)} == values
            assert ((targets == max(values)).sum(axis=(1, 2)) > 20).all()
        assert (made.targets[made.images == 0] == 0).all()
        for marker in made.markers.transpose(1, 2, 0):
            at = made.targets[np.arange(len(made.labels)), *marker]
            assert (at == 2 + made.labels).mean() >= (1 if preset == "lra128" else 0.95)
    path_x = sample("lra128")
    assert path_x.targets is not None
    assert (path_x.targets[path_x.images > 64] > 0).all()


def test_each_dash_has_the_target_of_its_own_contour() -> None:
    spec = spec_of("lra256")
    made = generate(spec, 0, "test", 0, 20, targets=True)
    assert made.targets is not None
    right = []
    for found, targets in zip(geometries("lra256", 20), made.targets, strict=True):
        for which, contour in enumerate(found.contours):
            discs = (which == found.start) + (which == found.end)
            right += (targets[contour[:, 0], contour[:, 1]] == 1 + discs).tolist()
        for contour in found.distractors:
            right += (targets[contour[:, 0], contour[:, 1]] == 1).tolist()
    assert np.mean(right) > 0.97  # targets may cross


def test_a_core_makes_path_x_images_fast_enough() -> None:
    """At least 25 a second on a core of its own; the floor is lower, for a machine that others load."""
    generate(spec_of("lra128"), 0, "speed", 0, 1)
    start = time.process_time()
    generate(spec_of("lra128"), 0, "speed", 0, 50, targets=True)
    assert 50 / (time.process_time() - start) >= 10

"""The Long Range Arena's files: found, read in their order, divided as in the literature, bad ones told by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import random_split

from flashtrain.data import release
from flashtrain.data.image_set import npz_fingerprint, open_npz, read_npz, split_places
from flashtrain.data.release import find_pathfinder, list_images, open_release, read_metadata

Image = pytest.importorskip("PIL.Image")

SIDE, HARD = 32, "curv_contour_length_14"
# As text, 10 and 12 come before 2.
BATCHES, PER_BATCH = (2, 10, 12), 7


def grey(number: int, side: int = SIDE) -> np.ndarray:
    """An image like no other: its corner says which one it is."""
    image = np.random.default_rng(number).integers(0, 256, (side, side), dtype=np.uint8)
    image[0, 0] = number
    return image


def label(number: int) -> int:
    return number * number % 5 % 2


def write_set(folder: Path, numpy_metadata: bool = False, side: int = SIDE) -> None:
    """One difficulty: 21 images in three batches, numbered in the order in which they count."""
    (folder / "metadata").mkdir(parents=True)
    number = 0
    for batch in BATCHES:
        (folder / "imgs" / str(batch)).mkdir(parents=True)
        rows = []
        for index in range(PER_BATCH):
            name = f"sample_{index}.png"
            Image.fromarray(grey(number, side)).save(folder / "imgs" / str(batch) / name)
            rows.append([f"imgs/{batch}", name, index, label(number), 1.8, 14, 4, 5, 1.5, 2, 1])
            number += 1
        if numpy_metadata:
            with (folder / "metadata" / f"{batch}.npy").open("wb") as file:
                np.save(file, np.array(rows))
        else:
            text = "".join(" ".join(map(str, row)) + "\n" for row in rows)
            (folder / "metadata" / f"{batch}.npy").write_text(text)


@pytest.fixture
def inner(tmp_path) -> Path:
    """The release as it is unpacked: the outer tree with a broken pathfinder128, and the inner one."""
    outer = tmp_path / "unpacked" / "lra_release"
    for name in ("listops-1000", "lra_release/listops-1000", "lra_release/tsv_data"):
        (outer / name).mkdir(parents=True)
    write_set(outer / "pathfinder128" / HARD, side=8)
    write_set(outer / "lra_release" / "pathfinder128" / HARD, side=8)
    write_set(outer / "lra_release" / f"pathfinder{SIDE}" / HARD)
    return outer / "lra_release"


@pytest.fixture
def opened(tmp_path) -> Callable:
    return lambda path, difficulty=HARD, side=SIDE: open_release(path, side, difficulty, tmp_path / "prepared")


def numbers(part) -> list[int]:
    return [int(image[0, 0]) for image in part.read(np.arange(part.length)).images]


def test_the_division_is_that_of_random_split_with_seed_42():
    for count in (10, 21, 199_999, 200_000):
        tenth = int(0.1 * count)  # as the code of the literature rounds
        lengths = [count - 2 * tenth, tenth, tenth]
        expected = random_split(range(count), lengths, generator=torch.Generator().manual_seed(42))
        found = split_places(count)
        assert list(found) == ["train", "val", "test"]
        for part, places in zip(expected, found.values(), strict=True):
            assert np.array_equal(part.indices, places)
    assert [len(places) for places in split_places(200_000).values()] == [160_000, 20_000, 20_000]


def test_too_few_images_to_divide_are_refused():
    with pytest.raises(ValueError, match="9 images cannot be divided"):
        split_places(9)


@pytest.mark.parametrize("numpy_metadata", [False, True])
def test_every_image_comes_with_its_label_and_pixels_in_the_order_of_numbers(tmp_path, opened, numpy_metadata):
    write_set(tmp_path / f"pathfinder{SIDE}" / HARD, numpy_metadata)
    found = opened(tmp_path / f"pathfinder{SIDE}")
    assert (found.name, found.side) == (f"pathfinder{SIDE}/{HARD}", SIDE)
    places = split_places(21)
    for name in ("train", "val", "test"):
        part = getattr(found, name)
        assert numbers(part) == places[name].tolist()
        assert part.labels.tolist() == [label(number) for number in places[name]]
        assert all(np.array_equal(part.images[i], grey(number)) for i, number in enumerate(places[name]))
        assert part.images.dtype == np.uint8 and not part.images.flags.writeable


def test_batches_are_ordered_as_numbers_and_not_as_text(inner):
    listed = list_images(inner / f"pathfinder{SIDE}" / HARD)
    assert [image.path.split("/")[1] for image in listed] == ["2"] * 7 + ["10"] * 7 + ["12"] * 7
    assert [image.label for image in listed] == [label(number) for number in range(21)]


@pytest.mark.parametrize("start", ["../..", "..", ".", f"pathfinder{SIDE}"])
def test_the_inner_tree_is_found_from_any_folder_above(inner, start):
    assert find_pathfinder(inner / start, SIDE) == inner / f"pathfinder{SIDE}"


def test_a_link_with_the_right_name_is_enough(tmp_path, inner):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "pathfinder32").symlink_to(inner / "pathfinder32")
    for start in (tmp_path / "links", tmp_path / "links" / "pathfinder32"):
        assert find_pathfinder(start, 32) == tmp_path / "links" / "pathfinder32"


@pytest.mark.parametrize("start", ["../..", "..", ".", "pathfinder128"])
def test_of_the_two_copies_of_pathfinder128_the_inner_one_is_taken(inner, start):
    assert find_pathfinder(inner / start, 128) == inner / "pathfinder128"


def test_the_outer_copy_is_refused_where_the_inner_one_is_there(inner):
    with pytest.raises(ValueError, match=f"broken when first released; give {inner / 'pathfinder128'}"):
        find_pathfinder(inner.parent / "pathfinder128", 128)


def test_the_outer_tree_alone_is_taken_with_a_warning(tmp_path, caplog):
    outer = tmp_path / "lra_release"
    write_set(outer / "pathfinder128" / HARD, side=8)
    with caplog.at_level(logging.WARNING):
        assert find_pathfinder(outer, 128) == outer / "pathfinder128"
    assert "outer tree's copy" in caplog.text
    with pytest.raises(ValueError, match=r"it has pathfinder128; that is the outer tree only: unpack lra_release/lra_"):
        find_pathfinder(outer, 32)


def test_a_folder_without_the_release_is_told(tmp_path, inner):
    with pytest.raises(ValueError, match=r"no folder pathfinder64 .*; it has pathfinder128, pathfinder32$"):
        find_pathfinder(inner, 64)
    with pytest.raises(ValueError, match="there is no such folder"):
        find_pathfinder(tmp_path / "nowhere", 32)
    with pytest.raises(ValueError, match="images of 64 x 64 are wanted; give the folder pathfinder64"):
        find_pathfinder(inner / "pathfinder32", 64)


def test_another_difficulty_is_told_with_those_that_are_there(inner, opened):
    with pytest.raises(ValueError, match=f"curv_baseline: no metadata.*pathfinder32 has {HARD}"):
        opened(inner, "curv_baseline")


def test_the_known_empty_file_is_left_out_by_its_name(tmp_path, opened):
    folder = tmp_path / "pathfinder32" / "curv_baseline"
    write_set(folder)
    text = (folder / "metadata" / "2.npy").read_text().splitlines()
    (folder / "imgs" / "0").mkdir()
    (folder / "imgs" / "0" / "sample_172.png").write_bytes(b"")
    (folder / "metadata" / "0.npy").write_text("imgs/0 sample_172.png 172 1 1.8 6 2 5 1.5 2 1\n")
    assert len(text) == PER_BATCH
    found = opened(tmp_path / "pathfinder32", "curv_baseline")
    assert sorted(numbers(found.train) + numbers(found.val) + numbers(found.test)) == list(range(21))


def test_the_same_file_is_no_exception_elsewhere(tmp_path, opened):
    write_set(tmp_path / "pathfinder32" / HARD)
    (tmp_path / "pathfinder32" / HARD / "metadata" / "0.npy").write_text("imgs/0 sample_172.png 172 1\n")
    with pytest.raises(ValueError, match=r"1 of 22 images cannot be read: imgs/0/sample_172\.png \(missing\)"):
        opened(tmp_path / "pathfinder32")


def test_all_bad_images_are_told_in_one_message(tmp_path, inner, opened):
    folder = inner / f"pathfinder{SIDE}" / HARD / "imgs"
    whole = (folder / "2" / "sample_3.png").read_bytes()
    (folder / "2" / "sample_0.png").unlink()
    (folder / "2" / "sample_1.png").write_bytes(b"")
    (folder / "2" / "sample_2.png").write_bytes(b"no picture")
    (folder / "2" / "sample_3.png").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(grey(0, 16)).save(folder / "2" / "sample_4.png")
    (folder / "2" / "sample_5.png").unlink()
    (folder / "2" / "sample_5.png").mkdir()
    with pytest.raises(ValueError) as error:
        opened(inner)
    assert (
        "6 of 21 images cannot be read: imgs/2/sample_0.png (missing), imgs/2/sample_1.png (empty), "
        "imgs/2/sample_2.png (damaged), imgs/2/sample_3.png (damaged), imgs/2/sample_4.png (16 x 16 pixels), "
        "imgs/2/sample_5.png (is a directory); unpack the release again"
    ) in str(error.value)
    assert [path.name for path in (tmp_path / "prepared").iterdir() if path.suffix != ".lock"] == []


def test_of_many_bad_images_ten_are_named_and_all_are_counted(inner, opened):
    for path in (inner / f"pathfinder{SIDE}" / HARD / "imgs").glob("1*/*.png"):
        path.unlink()
    with pytest.raises(ValueError) as error:
        opened(inner)
    assert "14 of 21 images cannot be read" in str(error.value) and " and 4 more;" in str(error.value)
    assert str(error.value).count("(missing)") == 10


def test_after_a_failure_the_mended_release_is_read(inner, opened):
    path = inner / f"pathfinder{SIDE}" / HARD / "imgs" / "10" / "sample_0.png"
    whole = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
        opened(inner)
    path.write_bytes(whole)
    assert opened(inner).train.length == 17


def test_coloured_images_become_grey(tmp_path, opened):
    write_set(tmp_path / "pathfinder32" / HARD)
    path = tmp_path / "pathfinder32" / HARD / "imgs" / "2" / "sample_0.png"
    Image.fromarray(np.repeat(grey(0)[:, :, None], 3, axis=2)).save(path)
    found = opened(tmp_path / "pathfinder32")
    parts = [getattr(found, name) for name in ("train", "val", "test")]
    (image,) = [part.images[i] for part in parts for i in range(part.length) if part.images[i][0, 0] == 0]
    assert np.array_equal(image, grey(0))


def test_images_are_read_once_and_then_from_the_packed_files(inner, opened, monkeypatch):
    before = opened(inner)
    monkeypatch.setattr(release, "_decode", lambda *_, **__: pytest.fail("read again"))
    after = opened(inner)
    assert after.fingerprint == before.fingerprint
    assert np.array_equal(before.train.images, after.train.images)


def test_the_fingerprint_is_that_of_pixels_and_labels_wherever_they_lie(tmp_path, inner, opened):
    write_set(tmp_path / "again" / "pathfinder32" / HARD, numpy_metadata=True)
    first, second = opened(inner), opened(tmp_path / "again")
    assert first.fingerprint == second.fingerprint
    labels = np.array([label(number) for number in range(21)])
    images = np.stack([grey(number) for number in range(21)])
    assert npz_fingerprint(images, labels) == first.fingerprint
    for changed in (npz_fingerprint(images, 1 - labels), npz_fingerprint(images[::-1], labels)):
        assert changed != first.fingerprint


def test_what_a_killed_process_left_is_made_again(tmp_path, inner, opened):
    found = opened(inner)
    (packed,) = [path for path in (tmp_path / "prepared").iterdir() if path.is_dir()]
    packed.rename(packed.with_name(f".{packed.name}.unfinished"))
    (packed.with_name(f".{packed.name}.unfinished") / "header.json").unlink()
    assert opened(inner).fingerprint == found.fingerprint
    assert [path.name for path in (tmp_path / "prepared").iterdir() if path.is_dir()] == [packed.name]


def test_a_damaged_packed_file_is_told(tmp_path, inner, opened):
    opened(inner)
    (images,) = (tmp_path / "prepared").glob("release-*/train.images.npy")
    images.write_bytes(images.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"damaged .*delete this folder, and it is made again"):
        opened(inner)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "the file is empty"),
        (b"imgs/2 sample_0.png 0\n", "row 0"),
        (b"imgs/2 sample_0.png 0 1\nimgs/2 sample_1.png 1 7\n", "row 1"),
        (b"\xff\xfe\x00", "neither text nor a NumPy array of texts"),
        (b"\x93NUMPY\x01", "neither text nor a NumPy array of texts"),
    ],
)
def test_bad_metadata_is_told_by_file_and_row(tmp_path, content, told):
    (tmp_path / "3.npy").write_bytes(content)
    with pytest.raises(ValueError, match=told) as error:
        read_metadata(tmp_path / "3.npy")
    assert "3.npy" in str(error.value)


def test_empty_lines_at_the_end_of_metadata_are_no_images(tmp_path):
    (tmp_path / "3.npy").write_bytes(b"imgs/2 sample_0.png 0 1\r\nimgs/2 sample_1.png 1 0\r\n\r\n\n")
    assert [image.label for image in read_metadata(tmp_path / "3.npy")] == [1, 0]


def test_pickled_metadata_is_not_run(tmp_path):
    np.save(tmp_path / "3.npy", np.array([["imgs/2", "a.png", 0, 1]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="neither text nor a NumPy array of texts"):
        read_metadata(tmp_path / "3.npy")


def npz(path: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    np.savez(path, images=images, labels=labels)
    return path


def test_an_npz_is_divided_as_the_release_is(tmp_path):
    images, labels = np.stack([grey(number) for number in range(21)]), np.arange(21) % 3
    found = open_npz(npz(tmp_path / "own.npz", images, labels.astype(np.uint8)), num_classes=3)
    assert (found.name, found.side) == ("own.npz", SIDE)
    for name, places in split_places(21).items():
        assert numbers(getattr(found, name)) == places.tolist()
        assert getattr(found, name).labels.tolist() == labels[places].tolist()
    read_images, read_labels = read_npz(tmp_path / "own.npz", num_classes=3)
    assert np.array_equal(read_images, images) and read_labels.dtype == np.int64
    assert found.fingerprint == npz_fingerprint(images, labels)


IMAGES, LABELS = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("images", "labels", "told"),
    [
        (IMAGES.astype(np.float32), LABELS, r"images is float32 \[4, 8, 8\]: must be uint8"),
        (IMAGES[..., None], LABELS, r"images is uint8 \[4, 8, 8, 1\]: must be \[n, side, side\]"),
        (IMAGES[:, :4], LABELS, r"images is uint8 \[4, 4, 8\]: must be \[n, side, side\]"),
        (IMAGES[:0], LABELS[:0], "images is .*at least one"),
        (IMAGES, LABELS[:3], r"labels is int64 \[3\]: must be whole numbers \[4\]"),
        (IMAGES, LABELS.astype(np.float64), "labels is float64"),
        (IMAGES, LABELS * 2, r"labels has 0 to 2: must lie in 0\.\.1; .* take classifier\.num_classes=3"),
        (IMAGES, LABELS - 1, "labels has -1 to 0"),
    ],
)
def test_a_wrong_array_is_told_with_its_name_and_the_fix(tmp_path, images, labels, told):
    with pytest.raises(ValueError, match=told):
        read_npz(npz(tmp_path / "own.npz", images, labels), num_classes=2)


def test_a_file_that_is_no_npz_is_told(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        read_npz(tmp_path / "none.npz", 2)
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "one.npy", IMAGES)
    for name in ("text.npz", "one.npy"):
        with pytest.raises(ValueError, match=r"not a readable \.npz file"):
            read_npz(tmp_path / name, 2)
    np.savez(tmp_path / "other.npz", images=IMAGES, y=LABELS)
    with pytest.raises(ValueError, match="no array labels in it, but images, y"):
        read_npz(tmp_path / "other.npz", 2)

"""Prompts with images, against real servers of a tiny Qwen2.5-VL and InternVL3, and transformers' results."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zlib

import numpy as np
import pytest

import rollout_client.client
from models import DTYPES, IN_MEMORY, OF_VLLM, perturbed, random_adapter, read_model, read_safetensors, renamed
from rollout_client import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Pixels,
    SamplingParams,
    _parts,
    processed_pixels,
)
from rollout_client.cli import main
from rollout_client.replay import Recorder, RecordingClient, read_receipts, replay
from serving import FIXTURES, PUSH_MODEL, bits, server

MODEL = FIXTURES / "qwen2_5_vl"
CONFIG = json.loads((MODEL / "config.json").read_text())
PAD = CONFIG["image_token_id"]
SIDE, PATCH, MERGE, FRAMES = 28, 14, 2, 2
DTYPES["U8"] = np.uint8


class Processor:
    """As an image processor of Qwen2.5-VL, for images that need no resize."""

    patch_size, merge_size, temporal_patch_size = PATCH, MERGE, FRAMES
    image_mean, image_std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

    def __call__(self, images, return_tensors):
        assert return_tensors == "np"
        patches, grids = zip(*map(self.patches, images), strict=True)
        return {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids)}

    def patches(self, image):
        mean, std = (np.float32(x) * np.float32(255) for x in (self.image_mean, self.image_std))
        chw = ((image.astype(np.float32) - mean) / std).transpose(2, 0, 1)
        _, height, width = chw.shape
        x = chw.reshape(3, height // SIDE, MERGE, PATCH, width // SIDE, MERGE, PATCH).transpose(1, 4, 2, 5, 0, 3, 6)
        x = np.repeat(x[:, :, :, :, :, None], FRAMES, axis=5)
        return x.reshape(-1, 3 * FRAMES * PATCH * PATCH), (1, height // PATCH, width // PATCH)


@pytest.fixture(scope="module")
def client(pytestconfig):
    with server(pytestconfig.getoption("--server"), MODEL, "--limit-mm-per-prompt", "image=3") as client:
        yield client


@pytest.fixture(scope="module")
def reference():
    return read_safetensors(MODEL / "reference.safetensors")


def case(reference, index):
    """The tokens and the pictures of a case."""
    tokens, pictures = reference[f"tokens_{index}"].tolist(), []
    while f"rgb_{index}_{len(pictures)}" in reference:
        pictures.append(reference[f"rgb_{index}_{len(pictures)}"])
    return tokens, pictures


def collapsed(tokens, pictures):
    """The tokens with one placeholder for each picture."""
    out, at = [], 0
    for picture in pictures:
        start = tokens.index(PAD, at)
        out += [*tokens[at:start], PAD]
        at = start + picture.shape[0] * picture.shape[1] // SIDE**2
    return out + tokens[at:]


def picture(rng, rows=2, columns=3):
    return rng.integers(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8)


def test_scores_are_those_of_transformers(pytestconfig, reference):
    cases = [case(reference, index) for index in range(8)]
    flags = ["--dtype", "float32", "--limit-mm-per-prompt", "image=3"]
    with server(pytestconfig.getoption("--server"), MODEL, *flags) as it:
        scores = it.score([tokens for tokens, _ in cases], images=[pictures for _, pictures in cases])
    for index, score in enumerate(scores):
        apart = np.abs(np.array(score.raw_logprobs[1:]) - reference[f"logprobs_f32_{index}"])
        assert apart.max() < 1e-4, index


def test_the_server_says_how_it_takes_images(client):
    images = client.info().images
    assert (images.most_per_prompt, images.most_tokens, images.token_side) == (3, 64, SIDE)
    assert (images.placeholder, images.forbidden_token_ids) == (PAD, [PAD, CONFIG["video_token_id"]])


def test_samples_say_what_the_model_saw(client, reference):
    tokens, pictures = case(reference, 2)
    sampling = SamplingParams(max_tokens=6, seed=5)
    whole, single = (
        client.generate([prompt], n=3, sampling=sampling, images=[pictures], return_text=False)[0]
        for prompt in (tokens, collapsed(tokens, pictures))
    )
    assert single.prompt_token_ids == whole.prompt_token_ids == tokens
    assert [s.token_ids for s in single.samples] == [s.token_ids for s in whole.samples]
    assert len(single.images) == len(pictures) > 1
    for image, rgb in zip(single.images, pictures, strict=True):
        height, width, _ = rgb.shape
        sizes = b"".join(size.to_bytes(4, "little") for size in (1, width, height))
        assert image.hash == Pixels.of(rgb).hash == hashlib.sha256(sizes + rgb.tobytes()).hexdigest()
        assert (image.width, image.height, image.tokens) == (width, height, width * height // SIDE**2)
        assert tokens[image.first_token : image.first_token + image.tokens] == [PAD] * image.tokens
    forbidden = {PAD, CONFIG["video_token_id"]}
    assert not forbidden & {token for s in single.samples for token in s.token_ids}


def test_chats_take_the_images_of_their_parts(client, rng):
    image = picture(rng)
    parts = [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}]
    (output,) = client.generate([[{"role": "user", "content": parts}]], images=[[image]])
    assert output.prompt_token_ids.count(PAD) == output.images[0].tokens == 6


def test_chats_may_hold_images_in_data_urls(client, rng):
    """Beside images of the prompt, in the order of the parts."""
    first, last = png_file(56, 56, (10, 20, 30)), picture(rng)
    url = {"url": f"data:image/png;base64,{base64.b64encode(first).decode()}"}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "and"}, {"type": "image"}]
    chat, sampling = [{"role": "user", "content": parts}], SamplingParams(seed=3)
    (inline,) = client.generate([chat], images=[[last]], sampling=sampling)
    parts[0] = {"type": "image"}
    (beside,) = client.generate([chat], images=[[first, last]], sampling=sampling)
    assert (inline.images, inline.prompt_token_ids) == (beside.images, beside.prompt_token_ids)
    assert inline.samples[0].token_ids == beside.samples[0].token_ids
    parts[0] = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(InvalidArgument, match=r"messages_json\[0\].content\[0\].image_url: .* is not a data: URL"):
        client.generate([chat], images=[[last]])


def test_images_that_do_not_fit_the_prompt_are_rejected(client, rng):
    image = picture(rng)
    for prompt, images, message in [
        ([1, PAD, PAD], [image], r"prompts\[0\].tokens: image 0 has 2 placeholders, but 2 x 3 tokens"),
        ([1], [image], "has placeholders of 0 images, but the prompt has 1"),
        ([1, PAD], [], r"but the prompt has no images"),
        ([PAD] * 4, [image] * 4, r"prompts\[0\].images\[3\].pixels: 4 images are more than 3"),
        ([PAD], [image[:27]], r"prompts\[0\].images\[0\].pixels: 84 x 27 pixels are not multiples of 28"),
        ([PAD], [image.astype(np.float32)], r"images\[0\]\[0\]: expected 8-bit RGB"),
        ([PAD], [Pixels(84, 56, b"no")], r"images\[0\].pixels.rgb: has 2 bytes"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            client.generate([prompt], images=[images], return_text=False)
    with pytest.raises(InvalidArgument, match="images: 1 for 2 prompts"):
        client.generate([[1], [2]], images=[None], return_text=False)
    with pytest.raises(InvalidArgument, match="no sample has this placeholder"):
        client.generate([[1]], sampling=SamplingParams(logit_bias={PAD: 100.0}), return_text=False)


def test_files_are_decoded_and_resized(client, rng):
    """A PNG of one colour stays one after the resize, so its pixels are known."""
    png = png_file(61, 30, (10, 20, 30))
    (output,) = client.generate([[5, PAD]], images=[[png]], return_text=False)
    (image,) = output.images
    assert (image.width, image.height, image.tokens) == (84, 56, 6)
    sizes = b"".join(size.to_bytes(4, "little") for size in (1, 84, 56))
    assert image.hash == hashlib.sha256(sizes + bytes((10, 20, 30)) * 84 * 56).hexdigest()
    for wrong, message in [(b"GIF89a", "GIF"), (png[: len(png) // 2], "encoded"), (b"", "encoded")]:
        with pytest.raises(InvalidArgument, match=message):
            client.generate([[5, PAD]], images=[[wrong]], return_text=False)


def png_file(width, height, colour):
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    rows = (b"\0" + bytes(colour) * width) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_a_call_in_parts_has_the_samples_of_one_message(client, rng, monkeypatch):
    prompts, images = [[5, PAD, i] for i in range(4)], [[picture(rng)] for _ in range(4)]

    def samples():
        outputs = client.generate(
            prompts, 2, SamplingParams(max_tokens=6, seed=9), images=images, return_text=False, request_id="mine"
        )
        return [(output.images, [bits(sample) for sample in output.samples]) for output in outputs]

    whole, sent = samples(), []
    stream = rollout_client.client.GenerateStream
    monkeypatch.setattr(rollout_client.client, "GenerateStream", lambda *a: sent.append(a[1]) or stream(*a))
    monkeypatch.setattr(_parts, "MAX_MESSAGE_BYTES", _parts._OTHER_BYTES + 30_000)
    assert samples() == whole
    assert [len(request.prompts) for request in sent] == [2, 2]


def test_the_command_sends_files(client, tmp_path, capsys):
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file, colour in zip(files, [(10, 20, 30), (200, 0, 0)], strict=True):
        file.write_bytes(png_file(61, 30, colour))
    flags = ["--seed", "3", "--max-tokens", "6", "--json", "--address", client.address]
    images = [argument for file in files for argument in ("--image", str(file))]
    sampling = SamplingParams(max_tokens=6, seed=3)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Hi"}]
    for prompt, arguments in [
        ([5, PAD, PAD, 6], ["--tokens", f"5 {PAD} {PAD} 6"]),
        ([{"role": "user", "content": content}], ["--chat", "Hi"]),
    ]:
        outputs = client.generate([prompt] * 2, 1, sampling, images=[[file.read_bytes() for file in files]] * 2)
        assert main(["generate", *arguments, arguments[-1], *images, *flags]) == 0
        printed = [json.loads(line)["raw_logprobs"] for line in capsys.readouterr().out.splitlines()]
        assert printed == [output.samples[0].raw_logprobs.tolist() for output in outputs]
    assert main(["generate", "--chat", "Hi", "--image", str(tmp_path / "none.png"), *flags]) == 1
    assert capsys.readouterr().err == f"rollout: --image {tmp_path / 'none.png'}: No such file or directory\n"


def test_recorded_images_are_replayed_exactly(client, rng, tmp_path, capsys):
    path, directory = tmp_path / "samples.jsonl", tmp_path / "images"
    images = [[picture(rng), picture(rng, 1, 4)], None, [picture(rng)]]
    prompts, sampling = [[5, PAD, 6, PAD], [7], [PAD]], SamplingParams(max_tokens=6)
    with Recorder(client, path, images=directory) as recorder:
        outputs = recorder.generate(prompts, 2, sampling, images=images, return_text=False)
        for wrong, message in [
            ([[png_file(84, 56, (1, 2, 3))]], r"^images\[0\]\[0\]: a file, whose pixels only the server knows"),
            ([], r"^images\[0\]: 0 images, but the prompt has 2"),
            ([images[0][::-1]], rf"^images\[0\]\[0\]: its digest is .*, but the model saw {outputs[0].images[0].hash}"),
        ]:
            with pytest.raises(InvalidArgument, match=message):
                recorder.add(outputs, sampling, images=wrong)
        with pytest.raises(InvalidArgument, match="a file, whose pixels"):
            recorder.generate([[PAD]], images=[[b"GIF89a"]], return_text=False)
    with RecordingClient(client.address, record=path, images=directory) as recording:
        recording.generate([[5, PAD]], 1, sampling, images=[images[2]], return_text=False)
    receipts = list(read_receipts(path))
    assert [receipt.images for receipt in receipts[:-1]] == [output.images for output in outputs for _ in range(2)]
    files = {file.stem: file for file in directory.iterdir()}
    assert files.keys() == {image.hash for output in outputs for image in output.images}
    # The server decodes the files to the same pixels.
    first = outputs[0].images[0]
    (decoded,) = client.generate([[PAD]], images=[[files[first.hash].read_bytes()]], return_text=False)
    assert decoded.images[0].hash == first.hash

    def command(*arguments):
        capsys.readouterr()
        return main(["replay", str(path), "--address", client.address, *arguments]), capsys.readouterr().err

    assert command("--images", str(directory)) == (0, "")
    status, error = command()
    assert status == 1 and first.hash in error and "give --images, the directory" in error
    assert replay(client, receipts[2:4]).same, "prompts without images need no directory"
    intact = files[first.hash].read_bytes()
    for changed in (intact[:-1], intact[:60] + bytes([intact[60] ^ 1]) + intact[61:], png_file(84, 56, (1, 2, 3)), b""):
        files[first.hash].write_bytes(changed)
        message = f"{files[first.hash]} was changed .* not those of the image {first.hash}"
        with pytest.raises(InvalidArgument, match=message):
            replay(None, receipts, images=directory)  # no client: nothing is sent
    files[first.hash].unlink()
    status, error = command("--images", str(directory))
    assert status == 1 and f"{files[first.hash]}: No such file or directory; expected the image {first.hash}" in error
    assert command("--images", str(directory), "--line", "5") == (0, "")


def test_recorded_tiles_are_replayed_exactly(pytestconfig, rng, tmp_path):
    path, directory = tmp_path / "samples.jsonl", tmp_path / "images"
    image = rng.integers(0, 256, (3, 2 * SIDE, 2 * SIDE, 3), dtype=np.uint8)
    sampling = SamplingParams(max_tokens=6)
    with server(pytestconfig.getoption("--server"), FIXTURES / "internvl3") as client:
        with Recorder(client, path, images=directory) as recorder:
            recorder.generate([[5, PAD]], 2, sampling, images=[[image]], return_text=False)
        receipts = list(read_receipts(path))
        assert [receipt.images[0].tiles for receipt in receipts] == [3, 3]
        assert replay(client, receipts, images=directory).same


def test_a_text_model_rejects_images(pytestconfig, rng):
    with (
        server(pytestconfig.getoption("--server"), PUSH_MODEL) as text_model,
        pytest.raises(InvalidArgument, match="this model takes no images"),
    ):
        text_model.generate([[1]], images=[[picture(rng)]], return_text=False)


@pytest.mark.parametrize("prefixes", [IN_MEMORY, OF_VLLM])
def test_checkpoints_load_under_all_names(pytestconfig, tmp_path, client, prefixes):
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    stored = path.read_bytes()
    header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
    metadata = {name: header.pop(name) for name in ["__metadata__"] if name in header}
    text = json.dumps({**metadata, **renamed(prefixes, header)}).encode()
    data = stored[8 + int.from_bytes(stored[:8], "little") :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with server(pytestconfig.getoption("--server"), tmp_path) as other:
        assert other.checksum() == client.checksum()


def test_pushes_under_a_trainers_names_change_tower_and_decoder(client, rng):
    state, image = read_model(MODEL), picture(rng)
    loaded = client.checksum()

    def sample():
        sampling = SamplingParams(max_tokens=8, seed=3)
        return client.generate([[5, PAD, 6]], images=[[image]], sampling=sampling, return_text=False)[0].samples[0]

    before = sample()
    changed = dict(state)
    name = "visual.blocks.0.attn.qkv.weight"
    changed[name] = (state[name].astype(np.float32) * 3).astype(state[name].dtype)
    client.push_full(renamed(IN_MEMORY, changed))
    assert sample().raw_logprobs.tobytes() != before.raw_logprobs.tobytes()
    expected = client.checksum()
    client.push_full(renamed(IN_MEMORY, state))
    client.push_delta(
        renamed(IN_MEMORY, state), renamed(IN_MEMORY, changed), base_version=client.status().weight_version
    )
    assert client.checksum() == expected, "a delta of the fused tensor"
    client.push_full(renamed(IN_MEMORY, state))
    assert client.checksum() == loaded
    assert sample().raw_logprobs.tobytes() == before.raw_logprobs.tobytes()


def qkv_adapter(rng, state):
    """An adapter of the first attention of the tower, under the names in memory."""
    rows, columns = state["visual.blocks.0.attn.qkv.weight"].shape
    tensors = {
        f"base_model.model.model.visual.blocks.0.attn.qkv.lora_{factor}.weight": rng.normal(size=shape).astype("f4")
        for factor, shape in {"A": (2, columns), "B": (rows, 2)}.items()
    }
    return tensors, {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["qkv"]}


def test_without_images_the_tower_is_neither_loaded_nor_pushed(pytestconfig, client, rng):
    state = read_model(MODEL)
    changed = perturbed(rng, state)
    tokens = [rng.integers(3, 500, 12).tolist() for _ in range(3)]
    of_tower, _ = qkv_adapter(rng, state)
    tensors, config = random_adapter(rng, {name: array for name, array in state.items() if name.startswith("model.")})
    config = {**config, "target_modules": [*config["target_modules"], "qkv"], "rank_pattern": {"qkv": 2}}

    def scores(server):
        return [score.raw_logprobs for score in server.score(tokens)]

    with server(pytestconfig.getoption("--server"), MODEL, "--limit-mm-per-prompt", "image=0") as text_only:
        memory, all_memory = text_only.status().memory.entries, client.status().memory.entries
        assert memory["weights"] < all_memory["weights"]
        assert not {"tower_workspace", "embeddings"} & {name for name, count in memory.items() if count}
        assert not [parameter.name for parameter in text_only.parameters() if parameter.name.startswith("visual.")]
        with pytest.raises(InvalidArgument, match="1 images are more than 0"):
            text_only.generate([[5, PAD]], images=[[picture(rng)]], return_text=False)
        for push in (
            lambda server: server.push_full(state),
            lambda server: server.push_full(renamed(IN_MEMORY, changed)),
            lambda server: server.push_lora({**tensors, **of_tower}, config),
            lambda server: server.push_lora(None),
            lambda server: server.push_full(state),
        ):
            push(text_only)
            push(client)
            assert scores(text_only) == scores(client)
        delta = {**state, "visual.patch_embed.proj.weight": changed["visual.patch_embed.proj.weight"]}
        version = text_only.status().weight_version
        text_only.push_delta(state, delta, base_version=version)
        assert scores(text_only) == scores(client)


def test_a_push_may_leave_out_a_frozen_tower(client, rng):
    state, image = read_model(MODEL), picture(rng)
    decoder = perturbed(rng, {name: array for name, array in state.items() if not name.startswith("visual.")})
    changed = {**state, **decoder}

    def score():
        return client.score([[5, PAD, 6, 7]], images=[[image]])[0].raw_logprobs

    def pushed(parameters, **options):
        client.push_full(parameters, **options)
        return score(), client.checksum()

    loaded = pushed(state)
    expected = pushed(changed)
    assert expected != loaded
    with pytest.raises(InvalidArgument, match="brings every parameter; "):
        client.push_full(decoder)
    pushed(state)
    encoded = client.status().encoded_images
    assert pushed(decoder, keep_missing=True) == expected
    assert client.status().encoded_images == encoded, "the tower is the same"
    # An adapter on the tower is taken out.
    tensors, config = qkv_adapter(rng, state)
    client.push_lora(tensors, config)
    assert score() != expected[0]
    assert pushed(decoder, keep_missing=True) == expected
    client.sleep()
    client.wake()
    assert (score(), client.checksum()) == expected
    client.sleep(level=2)
    client.wake()
    with pytest.raises(FailedPrecondition, match="none to keep"):
        client.push_full(decoder, keep_missing=True)
    assert pushed(state) == loaded


def test_an_image_that_was_sent_is_named_by_its_hash(client, rng):
    first, second = picture(rng), picture(rng, 1, 2)
    tokens, sampling = [5, PAD, 6, PAD], SamplingParams(max_tokens=6, seed=5)
    call = lambda *images: client.generate([tokens], images=[images], sampling=sampling, return_text=False)[0]  # noqa: E731
    sent = call(first, second)
    hashes = [image.hash for image in sent.images]
    named = call(*hashes)
    assert (named.images, bits(named.samples[0])) == (sent.images, bits(sent.samples[0]))
    assert client.status().named_images >= len(hashes)
    score = client.score([tokens], images=[hashes])[0]
    assert score.raw_logprobs == client.score([tokens], images=[[first, second]])[0].raw_logprobs
    for unknown, error, says in (
        ("00" * 32, NotFound, r"prompts\[0\].images\[0\].hash: the server does not hold the image 0{64}; send it"),
        ("00" * 31, InvalidArgument, r"prompts\[0\].images\[0\].hash: has 31 bytes; SHA-256 has 32"),
        ("a picture", InvalidArgument, r"images\[0\]\[0\]: 'a picture' is not a hash in hexadecimal"),
    ):
        with pytest.raises(error, match=says):
            call(unknown, second)
    client.sleep()
    assert client.status().named_images == 0
    client.wake()
    with pytest.raises(NotFound):
        call(*hashes)


def test_a_sleep_changes_no_sample_with_an_image(client, rng):
    image, sampling = picture(rng), SamplingParams(max_tokens=8, seed=4)
    run = lambda: client.generate([[5, PAD]], images=[[image]], sampling=sampling, return_text=False)[0].samples[0]  # noqa: E731
    before = run()
    client.sleep()
    client.wake()
    assert run().raw_logprobs.tobytes() == before.raw_logprobs.tobytes()


def test_processed_pixels_are_the_processors(rng):
    images = [picture(rng, 3, 2), picture(rng, 1, 5)]
    for sent, image in zip(processed_pixels(images, Processor()), images, strict=True):
        assert sent == Pixels.of(image)

    class Other(Processor):
        image_std = (0.5, 0.5, 0.5)

    processor = Processor()
    values = processor(images, return_tensors="np")
    lying = type("Lying", (Other,), {"__call__": lambda *_, **__: values})()
    with pytest.raises(InvalidArgument, match="are not 8-bit pixels"):
        processed_pixels(images, lying)
    with pytest.raises(InvalidArgument, match="gives neither image_grid_thw nor tiles"):
        processed_pixels(images, lambda images, return_tensors: {"pixel_values": images})


class TileProcessor:
    """As an image processor of InternVL, for images of two tiles that need no resize."""

    crop_to_patches = False
    image_mean, image_std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def __call__(self, images, crop_to_patches, return_tensors):
        assert crop_to_patches and return_tensors == "np"
        mean, std = (np.float32(x) * np.float32(255) for x in (self.image_mean, self.image_std))
        tiles = np.concatenate([np.split(image, 2, axis=1) for image in images])
        return {"pixel_values": ((tiles.astype(np.float32) - mean) / std).transpose(0, 3, 1, 2)}


def test_processed_pixels_are_the_tiles_of_a_processor_that_makes_some(rng):
    images = [picture(rng, 2, 4), picture(rng, 2, 4)]
    for sent, image in zip(processed_pixels(images, TileProcessor()), images, strict=True):
        assert (sent.width, sent.height, sent.tiles) == (56, 56, 2)
        assert sent == Pixels.of(np.stack(np.split(image, 2, axis=1)))


@pytest.mark.parametrize("name", ["internvl3", "internvl3-chat"])
def test_scores_of_tiles_are_those_of_transformers(pytestconfig, name):
    reference = read_safetensors(FIXTURES / name / "reference.safetensors")
    cases = [case(reference, index) for index in range(5)]
    flags = ["--dtype", "float32", "--limit-mm-per-prompt", "image=3"]
    with server(pytestconfig.getoption("--server"), FIXTURES / name, *flags) as client:
        info = client.info().images
        side = cases[0][1][0].shape[1]
        assert (info.tile_side, info.token_side, info.most_tokens) == (side, SIDE, 13 * (side // SIDE) ** 2)
        scores = client.score([tokens for tokens, _ in cases], images=[pictures for _, pictures in cases])
        tokens, pictures = cases[2]
        (output,) = client.generate([tokens], images=[pictures], return_text=False)
        wrong = pictures[0][:, 1:]
        with pytest.raises(InvalidArgument, match=f"1 tiles of {side} x {side - 1} pixels; this model's pictures"):
            client.generate([[info.placeholder]], images=[[wrong]], return_text=False)
    for index, score in enumerate(scores):
        apart = np.abs(np.array(score.raw_logprobs[1:]) - reference[f"logprobs_f32_{index}"])
        assert apart.max() < 1e-4, index
    for image, rgb in zip(output.images, pictures, strict=True):
        sizes = b"".join(size.to_bytes(4, "little") for size in (len(rgb), side, side))
        assert image.hash == hashlib.sha256(sizes + rgb.tobytes()).hexdigest()
        assert (image.tiles, image.tokens) == (len(rgb), len(rgb) * (side // SIDE) ** 2)

"""ms-swift's templates of InternVL3 as the plug-in applies them: the tokens and pixels that the trainer scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from swift.model import get_processor
from swift.template import get_template
from test_swift_training import OWN_LAYOUT, WITH_IMAGES, add_own_code

from models import write_vision_model
from rollout_client import InvalidArgument, Pixels
from rollout_client.swift._encoder import TemplateEncoder

MEAN, STD = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


@pytest.mark.parametrize("name", ["internvl3", OWN_LAYOUT])
def test_a_bfloat16_trainers_pixels_are_sent_before_they_are_rounded(tmp_path, monkeypatch, name):
    model_type, template_type = WITH_IMAGES[name]
    monkeypatch.setenv("INPUT_SIZE", "84")  # of the tiles in InternVL's own layout
    model = write_vision_model(tmp_path / "model", name)
    if name == OWN_LAYOUT:
        add_own_code(model)
    processor = get_processor(str(model), model_type=model_type, torch_dtype=torch.bfloat16)
    template = get_template(processor, template_type=template_type)
    template.set_mode("train")
    paths = [tmp_path / f"{i}.png" for i in range(2)]
    for path, size in zip(paths, [(75, 100), (60, 60)], strict=True):
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    question = {"role": "user", "content": "what<image>is<image>it"}
    given = {"messages": [question], "images": [str(path) for path in paths]}
    request = TemplateEncoder(template).encode(given)
    trained = template.encode({**given, "messages": [question, {"role": "assistant", "content": "x"}]})
    assert trained["input_ids"][: len(request.prompt)] == request.prompt
    assert [image.tiles for image in request.images] == [13, 1]
    scored = trained["pixel_values"]
    assert scored.dtype == template.model_info.torch_dtype == torch.bfloat16
    sent = torch.cat([tiles(image) for image in request.images]).permute(0, 3, 1, 2)
    assert torch.equal(((sent / 255 - MEAN) / STD).bfloat16(), scored)
    with pytest.raises(InvalidArgument, match="videos: rollout-server takes text and images only"):
        TemplateEncoder(template).encode({**given, "videos": ["none.mp4"]})


def tiles(pixels: Pixels):
    """`[tiles, height, width, 3]` of an image."""
    flat = torch.frombuffer(bytearray(pixels.rgb), dtype=torch.uint8)
    return flat.reshape(pixels.tiles, pixels.height, pixels.width, 3)

"""InternVL's own layout as its checkpoints bring it: the classes of `config.json`'s `auto_map`, for the tests' model.

Only what a training needs, with the names of parameters and the steps of InternVL's own code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM


class InternVisionConfig(PretrainedConfig):
    model_type = "intern_vit_6b"


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"

    def __init__(self, vision_config=None, llm_config=None, **others):
        self.vision_config = InternVisionConfig(**(vision_config or {}))
        self.llm_config = Qwen3Config(**(llm_config or {}))
        super().__init__(**others)


class Embeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, patches = config.hidden_size, (config.image_size // config.patch_size) ** 2
        self.class_embedding = nn.Parameter(torch.empty(1, 1, width))
        self.patch_embedding = nn.Conv2d(3, width, config.patch_size, config.patch_size)
        self.position_embedding = nn.Parameter(torch.empty(1, patches + 1, width))

    def forward(self, pixel_values):
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        rows = torch.cat([self.class_embedding.expand(len(patches), 1, -1), patches], dim=1)
        return rows + self.position_embedding


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, rows):
        tiles, length, width = rows.shape
        q, k, v = self.qkv(rows).reshape(tiles, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(tiles, length, width))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, rows):
        return self.fc2(F.gelu(self.fc1(rows)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) for _ in range(2))
        self.ls1, self.ls2 = (nn.Parameter(torch.empty(config.hidden_size)) for _ in range(2))
        self.attn, self.mlp = Attention(config), Mlp(config)

    def forward(self, rows):
        rows = rows + self.ls1 * self.attn(self.norm1(rows))
        return rows + self.ls2 * self.mlp(self.norm2(rows))


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))


class InternVisionModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings, self.encoder = Embeddings(config), Encoder(config)

    def forward(self, pixel_values):
        rows = self.embeddings(pixel_values)
        for block in self.encoder.layers:
            rows = block(rows)
        return rows


class InternVLChatModel(PreTrainedModel, GenerationMixin):
    config_class = InternVLChatConfig
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        width, text = 4 * config.vision_config.hidden_size, config.llm_config.hidden_size
        self.vision_model = InternVisionModel(config.vision_config)
        self.language_model = Qwen3ForCausalLM(config.llm_config)
        self.mlp1 = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, text), nn.GELU(), nn.Linear(text, text))
        self.post_init()

    def _init_weights(self, module):
        """All weights are in the checkpoint."""

    def extract_feature(self, pixel_values):
        """The embeddings `[tiles, tokens, width]` of tiles `[tiles, 3, side, side]`."""
        rows = self.vision_model(pixel_values)[:, 1:]
        tiles, patches, width = rows.shape
        side = int(patches**0.5)
        blocks = rows.reshape(tiles, side // 2, 2, side // 2, 2, width).permute(0, 1, 3, 2, 4, 5)
        return self.mlp1(blocks.reshape(tiles, patches // 4, 4 * width))

    def forward(self, input_ids=None, attention_mask=None, **others):
        return self.language_model(input_ids=input_ids, attention_mask=attention_mask, **others)

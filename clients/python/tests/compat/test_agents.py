"""`openai-agents`: an agent that calls a tool and answers with its result, by each of OpenAI's two APIs for chats."""

from __future__ import annotations

import asyncio

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

MODELS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]


@pytest.fixture(params=MODELS)
def calculator(request, caller):
    """An agent with a tool, and the arguments that its tool was called with."""
    calls = []

    @function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        calls.append((a, b))
        return a + b

    model = request.param("caller", AsyncOpenAI(base_url=f"{caller}/v1", api_key="none", max_retries=0))
    settings = ModelSettings(temperature=0)
    return Agent(name="calculator", instructions="Add.", model=model, tools=[add], model_settings=settings), calls


def test_a_run_with_a_tool(calculator):
    agent, calls = calculator
    result = Runner.run_sync(agent, "What is 1 + 2?", max_turns=3)
    assert (result.final_output, calls) == (" is 3.", [(1, 2)])
    assert len(result.raw_responses) == 2 and all(answer.usage.output_tokens for answer in result.raw_responses)


def test_a_streamed_run(calculator):
    agent, calls = calculator

    async def run():
        result = Runner.run_streamed(agent, "What is 1 + 2?", max_turns=3)
        kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        return result.final_output, kinds

    text, kinds = asyncio.run(run())
    assert (text, calls) == (" is 3.", [(1, 2)])
    assert kinds == ["tool_called", "tool_output", "message_output_created"]

"""langchain-openai: a chat, a stream, bound tools."""

import json
import sys
from importlib.metadata import version
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = sys.argv[1]
chat = ChatOpenAI(
    base_url=f"{URL}/v1", api_key="none", model="builtin", max_completion_tokens=24, max_retries=0, seed=1
)


@tool
def weather(days: Literal[1, 2, 3]) -> str:
    """The weather of some days."""
    return f"sunny for {days} days"


said = [SystemMessage("Be brief."), HumanMessage("Where does the river rise?", name="me")]
answer = chat.invoke(said)
assert answer.content and answer.usage_metadata["output_tokens"] > 0
priced = chat.model_copy(update={"include_response_headers": True}).invoke(said)
assert float(priced.response_metadata["headers"]["x-sprinter-tokens-per-s"]) > 0
assert "".join(part.content for part in chat.stream(said))

bound = chat.bind_tools([weather], parallel_tool_calls=False)
first = bound.invoke(said)
assert isinstance(first.content, str)
call = {"name": "weather", "args": {"days": 2}, "id": "call_1"}
told = [
    *said,
    AIMessage("", tool_calls=[call]),
    ToolMessage("sunny", tool_call_id="call_1"),
    HumanMessage("And then?"),
]
assert bound.invoke(told).response_metadata["model_name"] == "builtin"

forced = chat.bind_tools([weather], tool_choice="weather").invoke(said, max_completion_tokens=99)
assert forced.tool_calls[0]["name"] == "weather" and forced.tool_calls[0]["args"]["days"] in (1, 2, 3)


class River(BaseModel):
    """A river."""

    deep: bool
    kind: Literal["lake", "spring"]


for method in ("json_schema", "function_calling"):
    found = chat.with_structured_output(River, method=method).invoke(said, max_completion_tokens=99)
    assert isinstance(found, River), method

print(json.dumps({"langchain-openai": version("langchain-openai")}))

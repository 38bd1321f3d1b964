"""langchain-openai: a chat, a stream, bound tools."""

import json
import sys
from importlib.metadata import version

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL = sys.argv[1]
chat = ChatOpenAI(
    base_url=f"{URL}/v1", api_key="none", model="builtin", max_completion_tokens=24, max_retries=0, seed=1
)


@tool
def weather(days: int) -> str:
    """The weather of some days."""
    return f"sunny for {days} days"


said = [SystemMessage("Be brief."), HumanMessage("Where does the river rise?", name="me")]
answer = chat.invoke(said)
assert answer.content and answer.usage_metadata["output_tokens"] > 0
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

print(json.dumps({"langchain-openai": version("langchain-openai")}))

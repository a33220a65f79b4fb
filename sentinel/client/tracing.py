"""Keep Dynamo out of our functions, at no cost where nothing is compiled.

As torch.compiler.disable does, but without its wrapper around every call, and without importing Dynamo in `attach`,
which takes a second and makes a folder.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_SKIP_THIS_FRAME = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)

# None unless compiled code, or Dynamo, is at work in this thread; setting None lets what is called run as it is.
compiler = eval_frame.get_eval_frame_callback
set_compiler = eval_frame.set_eval_frame


def untraced(function: F, *, recursive: bool) -> F:
    """Dynamo neither follows a call of this function nor compiles its frame.

    What it calls is compiled as ever; with `recursive` the function itself sees to it that it is not, by
    `set_compiler(None)`, and Dynamo is told so.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP_THIS_FRAME)
    about: Any = function
    about._torchdynamo_disable = True
    about._torchdynamo_disable_msg = "sentinel watches here"
    about._torchdynamo_disable_recursive = recursive
    return function

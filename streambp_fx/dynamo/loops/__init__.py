"""Python loops along the sequence, which Dynamo would unroll, traced as PyTorch's `scan`.

NOTE [loops along the sequence]: `for t in range(x.shape[1])` makes of one length one graph, with a copy of
the body for each row, and nothing in it says that there is a state. Where the body is a step (it reads row t
of some values, takes some values from the row before, and gives one row of others) it is traced once, as the
body of a `scan`. Whether it is a step is read from the function's source: which names are read before they
are assigned, where the loop's variable occurs, what becomes of the results. The source is believed only if it
compiles to the code that runs. What is not understood, or what Dynamo cannot trace as a `scan`, is unrolled
as before. The functions themselves are not changed: Dynamo is given other code when it inlines one for this
backend.

NOTE [compared with the loop]: what a body asks of a value besides its numbers (which object it is, its
strides, whether it has a gradient) may have another answer for the first row, and the source does not show
what the functions do that it calls. So the source alone proves nothing of other people's code. Each frame
with such a scan is traced a second time, on a few rows, with its loops as they are, and the two graphs are
compared: outputs, gradients, which of them are None, changed buffers; and what is run around the graphs,
which is where Dynamo puts effects on Python objects. Where they differ, or cannot be compared, the frame is
compiled again with its loops unrolled.
"""

from __future__ import annotations

from .comparing import with_compared_loops
from .inlining import stand_in, watch_calls
from .record import note_graph, unrolled_loops

__all__ = ["note_graph", "stand_in", "unrolled_loops", "watch_calls", "with_compared_loops"]

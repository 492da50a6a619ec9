"""Files of a memory timeline: an HTML page that needs nothing else, and a memory_viz snapshot."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from html import escape
from itertools import islice
from typing import Any

from stagec.analysis.footprint import described
from stagec.ir.core import Value
from stagec.memory.arena import placed
from stagec.memory.timeline import ALL, Timeline
from stagec.support.diagnostics import error
from stagec.support.source import file_loc

#: More events than this are more than a viewer takes.
MOST_EVENTS = 1_000_000
#: More operations than this are drawn as one point for each action.
MOST_POINTS = 10_000
_COLORS = (
    "#4e79a7", "#a0cbe8", "#f28e2b", "#59a14f", "#8cd17d",
    "#b6992d", "#e15759", "#499894", "#d37295", "#9d7660", "#79706e", "#bab0ac",
)  # fmt: skip

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title><style>
body{font:14px system-ui,sans-serif;margin:1.5em}canvas{width:100%;height:60vh;display:block}
#tip{min-height:3em;white-space:pre-wrap;font-family:monospace}
#key span{margin-right:1.2em;white-space:nowrap}#key i{display:inline-block;width:.8em;height:.8em;
margin-right:.4em}</style></head><body><h1>TITLE</h1><div id="key"></div><canvas id="c"></canvas>
<div id="tip">Move over the picture.</div><script>
const DATA=JSON_DATA;
const {names,colors,points}=DATA,c=document.getElementById("c"),tip=document.getElementById("tip");
const gib=x=>(x/2**30).toFixed(3)+" GiB",sum=p=>p[2].reduce((a,b)=>a+b,0);
const top_=Math.max(...points.map(sum),1);
document.getElementById("key").innerHTML=names.map((n,k)=>
 `<span><i style="background:${colors[k]}"></i>${n}</span>`).join("");
function draw(at){const w=c.width=c.clientWidth,h=c.height=c.clientHeight,g=c.getContext("2d");
 const x=i=>i*w/points.length,y=v=>h-v/top_*(h-20);let low=points.map(()=>0);
 names.forEach((_,k)=>{const high=points.map((p,i)=>low[i]+p[2][k]);g.fillStyle=colors[k];
  g.beginPath();high.forEach((v,i)=>{g.lineTo(x(i),y(v));g.lineTo(x(i+1),y(v))});
  for(let i=points.length-1;i>=0;i--){g.lineTo(x(i+1),y(low[i]));g.lineTo(x(i),y(low[i]))}
  g.fill();low=high});
 g.fillStyle="#000";g.fillText(gib(top_),4,12);
 if(at!==undefined){g.strokeRect(x(at),0,Math.max(1,x(1)),h)}}
c.onmousemove=e=>{const i=Math.min(points.length-1,Math.floor(e.offsetX/c.clientWidth*
 points.length)),p=points[i];draw(i);
 tip.textContent=`${p[0]}\\n${gib(sum(p))}: `+names.map((n,k)=>p[2][k]?`${n} ${gib(p[2][k])}`:"")
  .filter(Boolean).join(", ")};
onresize=()=>draw();draw();
</script></body></html>
"""


def html(timeline: Timeline, title: str) -> str:
    """A page with the bytes of every category over the step; nothing is loaded from elsewhere."""
    points = list(islice(timeline.points(every=True), MOST_POINTS + 1))
    if len(points) > MOST_POINTS:
        points = list(timeline.points())
    used = [c for c in ALL if any(p.bytes.get(c) for p in points)]
    data = {
        "names": used,
        "colors": [_COLORS[ALL.index(c) % len(_COLORS)] for c in used],
        "points": [[described(p), 0, [p.bytes.get(c, 0) for c in used]] for p in points],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.replace("TITLE", escape(title)).replace("JSON_DATA", text)


def snapshot(timeline: Timeline) -> bytes:
    """A pickle of plain dicts, as `torch.cuda.memory._dump_snapshot` writes it, for memory_viz.

    Addresses are those of the caching allocator's model. Raises `DiagnosticError` for a step with
    too many events for a viewer.
    """
    trace = list(_trace(timeline))
    found: dict[str, Any] = {
        "segments": [],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(found, protocol=4)


def _trace(timeline: Timeline) -> Iterator[dict[str, Any]]:
    places = placed(timeline, "caching").places
    time = 0
    for number, (value, size) in enumerate(timeline.fixed(), 1):
        yield _entry("alloc", places[-number].offset, size, value, time)
    for event in timeline.events():
        time += 1
        if time > MOST_EVENTS:
            raise error(
                f"the step has more than {MOST_EVENTS:,} starts and ends of buffers",
                remedy="take fewer microbatches",
            )
        size, address = timeline.size(event.buffer), places[event.number].offset
        if event.starts:
            yield _entry("alloc", address, size, event.buffer.value, time)
        else:
            for action in ("free_requested", "free_completed"):
                yield _entry(action, address, size, event.buffer.value, time)


def _entry(action: str, address: int, size: int, value: Value, time: int) -> dict[str, Any]:
    place = file_loc(value.loc)
    frame = {
        "filename": place.file if place is not None else "",
        "line": place.line if place is not None else 0,
        "name": value.name,
    }
    return {
        "action": action,
        "addr": address + (1 << 32),
        "size": size,
        "stream": 0,
        "time_us": time,
        "frames": [frame],
    }

"""`explain().to_html(path)`: a served model as one page."""

from __future__ import annotations

import html
from typing import Any

from hotfuse.explain.full_text import audit_line, own_code_lines
from hotfuse.runtime.observe.summary import summary

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #d8dee4;
vertical-align: top } pre { background: #f6f8fa; padding: 1rem; overflow: auto; font-size: 12px } .num { text-align: right }
"""


def _table(head: list[str], rows: list[list[Any]]) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(x))}</td>" for x in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def page(data: dict[str, Any]) -> str:
    """Everything, as a self-contained page."""
    parts = [f"<h1>{html.escape(data['model'])}</h1>", f"<pre>{html.escape(chr(10).join(summary(data)))}</pre>",
             _table(["counter", "value"], [[k, v] for k, v in data["counts"].items()])]
    for site in data["sites"]:
        parts.append(f"<h2>call {html.escape(site['call'])}</h2>")
        for plan in site["plans"]:
            rows = [[p["index"], p["backend"], p["nodes"], p["begins"], ", ".join(f"{k} x{n}" for k, n in p["ops"].items())]
                    for p in plan["partitions"]]
            parts.append(f"<p>tier {plan['tier']}, {plan['nodes']} nodes, {plan['calls']} calls; inputs "
                         f"{html.escape(', '.join(plan['inputs']))}; guards {html.escape(', '.join(plan['guards']) or 'none')}</p>")
            said = [*own_code_lines(plan["own_code"]), *map(audit_line, plan["audits"])] if "own_code" in plan else []
            parts += [f"<p>{html.escape(line)}</p>" for line in said]
            parts.append(_table(["partition", "back end", "nodes", "begins at", "ops"], rows))
            parts.append(f"<details><summary>graph</summary><pre>{html.escape(plan['graph'])}</pre></details>")
        for reason in site["refused"]:
            parts.append(f"<p>stays in the model's own code:</p><pre>{html.escape(reason)}</pre>")
    if data["fallbacks"]:
        parts.append("<h2>fallbacks</h2>" + _table(["operator", "calls"], [[k, v] for k, v in data["fallbacks"].items()]))
    parts += [f"<p>constants not prepared: {html.escape(why)}</p>" for why in data.get("unprepared", ())]
    parts += [f"<p>the model's own code: {html.escape(line)}</p>" for line in data.get("own_code", ())]
    rows = [[f"{d['at']:.3f}", d["action"], d["why"], ", ".join(f"{k}={v}" for k, v in d["evidence"].items())]
            for d in data["decisions"]]
    parts.append("<h2>decisions</h2>" + _table(["seconds", "action", "why", "evidence"], rows))
    title = html.escape(f"hotfuse: {data['model']}")
    return (f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style></head>"
            f"<body>{''.join(parts)}</body></html>")

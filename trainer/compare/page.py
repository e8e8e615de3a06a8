"""The frame of report.html: head, style, navigation. The policy in its head forbids scripts and every request."""

from __future__ import annotations

from html import escape

_STYLE = """
:root{color-scheme:light dark;--back:#fbfbf9;--ink:#1c2430;--soft:#566070;--rule:#d9dce1;--card:#fff;--faster:#14735a;
--slower:#a83a28;--none:#566070;--open:#8a5a00;--track:#eceef1;--link:#1f4fa3}
@media (prefers-color-scheme:dark){:root{--back:#12161c;--ink:#e8ebf0;--soft:#a3adba;--rule:#323a46;--card:#1a2029;
--faster:#53c8a4;--slower:#f08a76;--none:#a3adba;--open:#e0b050;--track:#2a323d;--link:#8fb4f5}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main,header,nav{max-width:68rem;margin:0 auto;padding:0 1rem}
header{padding-top:2rem}
h1{font-size:clamp(1.3rem,1rem + 1.6vw,2rem);line-height:1.25;margin:.2rem 0 .8rem;text-wrap:balance}
h2{font-size:1.15rem;margin:2.4rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--rule)}
.over{color:var(--soft);font-size:.85rem;letter-spacing:.04em;text-transform:uppercase;margin:0}
.facts{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:0;padding:0;list-style:none;color:var(--soft);font-size:.88rem}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:1.2rem 0 0;list-style:none;font-size:.9rem}
a{color:var(--link)}
a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-999px}.skip:focus{left:1rem;top:.5rem;background:var(--card);padding:.4rem .8rem}
figure{margin:1rem 0}
figcaption,caption{color:var(--soft);font-size:.88rem;text-align:left;padding:.2rem 0 .5rem;caption-side:top}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:.5rem;padding:.5rem .8rem;margin:1rem 0}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.4rem .7rem .4rem 0;border-top:1px solid var(--rule);vertical-align:middle}
thead th{border-top:0;color:var(--soft);font-weight:600;font-size:.8rem}
tbody th{font-weight:600;overflow-wrap:break-word;min-width:9rem}
small{display:block;color:var(--soft);font-weight:400;font-size:.8rem}
td.wide{width:38%;min-width:9rem}
.strip{position:relative;height:1.5rem;background:var(--track);border-radius:.3rem;overflow:hidden;color:var(--none)}
.strip i{position:absolute;top:0;bottom:0}
.strip .one{width:1px;background:var(--soft)}
.strip .bar{top:calc(50% - 2px);bottom:auto;height:4px;background:currentColor;border-radius:2px}
.strip .dot{top:calc(50% - 6px);bottom:auto;width:12px;height:12px;margin-left:-6px;border-radius:50%;background:currentColor}
.strip .block{top:4px;bottom:4px;background:currentColor;border-radius:2px}
.ticks{display:flex;justify-content:space-between;position:relative;color:var(--soft);font-size:.75rem}
.ticks span[style]{position:absolute;transform:translateX(-50%)}
.strip.share{color:var(--link)}
.faster{color:var(--faster)}.slower{color:var(--slower)}.no_difference{color:var(--none)}.inconclusive{color:var(--open)}
.badge{display:inline-block;border:1px solid currentColor;border-radius:1rem;padding:.05rem .6rem;font-size:.82rem;
white-space:nowrap}
.mark{color:var(--open)}
.faults{border-left:4px solid var(--slower);background:var(--card);padding:.8rem 1rem .8rem 2rem;margin:0;overflow-wrap:anywhere}
.sentences{padding-left:1.2rem}
details{margin:.5rem 0}summary{cursor:pointer;padding:.2rem 0}
pre{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:.5rem;padding:.8rem;font-size:.8rem}
svg.chart{width:100%;height:auto;background:var(--card);border:1px solid var(--rule);border-radius:.5rem}
svg text{fill:var(--soft);font-size:12px;font-family:inherit}
svg .grid{stroke:var(--rule)}
svg .line{fill:none;stroke-width:2;stroke:currentColor}
.axis{margin:.2rem 0;color:var(--soft);font-size:.88rem}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;list-style:none;padding:0;margin:.2rem 0;font-size:.88rem}
.legend svg{margin-right:.4rem;vertical-align:middle}
.c0{color:#2f6fd0}.c1{color:#d0662f;stroke-dasharray:7 4}.c2{color:#1f9a76;stroke-dasharray:2 3}
.c3{color:#a64fc4;stroke-dasharray:9 3 2 3}
.c4{color:#b08900}.c5{color:#d14b78;stroke-dasharray:7 4}.c6{color:#3b9bb5;stroke-dasharray:2 3}
.c7{color:#7d8590;stroke-dasharray:9 3 2 3}
@media (max-width:40rem){td.wide{min-width:7rem}th,td{padding-right:.5rem}table{font-size:.84rem}
table.charted thead{position:absolute;left:-999px}table.charted tr{display:grid;grid-template-columns:1fr auto;gap:.2rem .8rem;
border-top:1px solid var(--rule);padding:.4rem 0}table.charted td,table.charted th{border:0;padding:0}
table.charted th,table.charted td.wide{grid-column:1/-1;width:auto}
table.charted td[data-label]::before{content:attr(data-label) " ";color:var(--soft);font-size:.8rem}}
@media print{.scroll{overflow:visible}}
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(headline: str, facts: list[str], sections: list[tuple[str, str, str]]) -> str:
    """A document: the verdict on top, then sections of (id, title, HTML)."""
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>{html}</section>'
        for name, title, html in sections
    )
    about = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(headline)}</title><style>{_STYLE}</style></head><body>"
        '<a class="skip" href="#verdicts">Skip to the verdicts</a>'
        f'<header><p class="over">Fuseline comparison</p><h1 id="headline">{escape(headline)}</h1><ul class="facts">{about}</ul>'
        f'</header><nav aria-label="Sections"><ul>{links}</ul></nav><main>{body}</main></body></html>\n'
    )

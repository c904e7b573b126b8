"""The style sheet of the page. Colours after Okabe and Ito, darker or lighter where the ground asks for it."""

__all__ = ["CSS"]

CSS = """
:root{color-scheme:light dark;--ground:#fcfcfa;--ink:#1d1f21;--soft:#62666b;--rule:#deded8;--grid:#ecece6;--box:#f4f4f0;
--shade:#0002;--yes:#1f6f54;--no:#a3420e;--open:#62666b;
--baseline:#1d1f21;--oracle:#7a7d80;--A2:#0072b2;--A3S:#2f97d0;--A3D:#008a66;--B2:#c85200;--B3S:#b57d00;--B3D:#b0568c;
--control:#75695c}
@media (prefers-color-scheme:dark){:root{--ground:#16181a;--ink:#e4e4e0;--soft:#9ea3a8;--rule:#33373a;--grid:#26292c;
--box:#1d2022;--shade:#000a;--yes:#6cc7a4;--no:#f0996a;--open:#9ea3a8;
--baseline:#e4e4e0;--oracle:#9ea3a8;--A2:#5aa9e6;--A3S:#93d1f5;--A3D:#3fc79c;--B2:#f0853f;--B3S:#e8b53a;--B3D:#e294c2;
--control:#b5a898}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums lining-nums}
main{max-width:1240px;margin:0 auto;padding:48px 24px 96px}
h1{font-size:28px;line-height:1.2;font-weight:600;letter-spacing:-.01em;margin:0 0 6px;max-width:40em}
h2{font-size:19px;line-height:1.3;font-weight:600;margin:64px 0 12px;padding-top:14px;border-top:1px solid var(--rule)}
h3{font-size:16px;font-weight:600;margin:0}
p{margin:0 0 12px;max-width:68ch}
.soft,.legend{color:var(--soft)}
.legend{font-size:13.5px;line-height:1.5;margin:10px 0 0}
.lead{font-size:20px;line-height:1.45;margin:28px 0 18px;max-width:46em}
ul{margin:0;padding:0;list-style:none;max-width:80ch}
li{padding:5px 0 5px 16px;position:relative}
li::before{content:"";position:absolute;left:0;top:17px;width:6px;height:1px;background:var(--soft)}
.box{overflow-x:auto;-webkit-overflow-scrolling:touch;overscroll-behavior-x:contain;
background:linear-gradient(var(--ground),var(--ground)) 0 0/20px 100% no-repeat local,
linear-gradient(var(--ground),var(--ground)) 100% 0/20px 100% no-repeat local,
linear-gradient(to right,var(--shade),transparent) 0 0/10px 100% no-repeat scroll,
linear-gradient(to left,var(--shade),transparent) 100% 0/10px 100% no-repeat scroll}
.box:focus-visible{outline:2px solid var(--A2);outline-offset:2px}
table{border-collapse:collapse;font-size:14px;line-height:1.35}
th,td{text-align:right;padding:5px 10px;white-space:nowrap;vertical-align:baseline;font-weight:400}
th:first-child,td:first-child{text-align:left;padding-left:0}
thead th{color:var(--soft);font-size:13px;border-bottom:1px solid var(--ink)}
tbody tr+tr>*{border-top:1px solid var(--rule)}
.all{width:100%}
.all th:first-child{position:sticky;left:0;background:var(--ground);padding-right:14px}
.all small{display:block;font-size:12.5px;color:var(--soft)}
.all:not(.sorted) .first>*{border-top:1px solid var(--ink)}
.all .lined{border-left:1px solid var(--rule)}
.all th,.all td{padding:6px}
.all th:first-child{padding-left:0}
.scores{margin:0 0 22px}
.scores th,.scores td{padding-right:14px}
.scores .head th{white-space:normal;vertical-align:bottom;color:var(--soft);font-size:13px;
border-top:0;border-bottom:1px solid var(--ink)}
.scores tr+.head th{padding-top:20px}
b{font-weight:700}
i{font-style:normal;line-height:1;display:inline-block;width:1em;
text-align:left;color:var(--soft);font-size:.85em;white-space:nowrap}
.absent{color:var(--soft);font-size:12.5px}
a{color:inherit;text-decoration-color:var(--rule);text-underline-offset:3px}
a:hover{text-decoration-color:currentColor}
.set{display:grid;grid-template-columns:300px minmax(0,1fr);gap:0 36px;padding:26px 0 20px;align-items:start;
border-top:1px solid var(--rule)}
.set:first-of-type{border-top:0}
.set h3{grid-column:1/-1}
.set table{width:100%;font-size:13.5px}
.set th,.set td{height:25px;line-height:25px;padding:0 8px}
.set th:first-child{padding-left:0}
.set thead th{height:29px;line-height:29px;font-size:12.5px}
.dot{display:inline-block;width:7px;height:7px;margin-right:8px;border-radius:50%;
background:currentColor;vertical-align:1px}
.strip{display:block;max-width:100%;height:auto;overflow:visible}
.strip text{font-size:12.5px;fill:var(--ink)}
.strip .tick{fill:var(--soft);font-size:12px}
.strip .grid{stroke:var(--grid)}
.strip .base{stroke:var(--soft);stroke-dasharray:2 3}
.strip circle,.strip path{fill:currentColor}
.strip circle{fill-opacity:.6}
.strip .mean{stroke:currentColor;stroke-width:2}
.strip .paper{fill:var(--ground);fill-opacity:.7;stroke:currentColor;stroke-width:1.4}
.c-baseline{color:var(--baseline)}.c-oracle{color:var(--oracle)}.c-A2{color:var(--A2)}.c-A3S{color:var(--A3S)}
.c-A3D{color:var(--A3D)}.c-B2{color:var(--B2)}.c-B3S{color:var(--B3S)}.c-B3D{color:var(--B3D)}
.c-narrow,.c-low-rank,.c-summed{color:var(--control)}
.claim{padding:18px 0;border-top:1px solid var(--rule);display:grid;grid-template-columns:1fr 1fr;gap:6px 40px}
.claim h3{grid-column:1/-1;max-width:46em}
.claim .rule{grid-column:1/-1;font-size:13.5px;color:var(--soft);margin:0 0 4px;max-width:80ch}
.claim p{font-size:14.5px;line-height:1.5;margin:0}
.claim span{display:block;color:var(--soft)}
.claim strong{font-weight:600}
.holds{color:var(--yes)}.fails{color:var(--no)}.open{color:var(--open)}
dl{display:grid;grid-template-columns:minmax(7em,max-content) minmax(0,1fr);gap:6px 24px;margin:0;max-width:90ch}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
pre{margin:0;padding:12px 14px;background:var(--box);border-radius:4px;
font:13.5px/1.5 ui-monospace,Menlo,Consolas,monospace}
code{font:12.5px/1.5 ui-monospace,Menlo,Consolas,monospace;color:var(--soft)}
.set code{white-space:nowrap;display:inline-block;padding:9px 0 3px}
.tag{display:inline-block;margin-left:6px;padding:0 5px;border:1px solid var(--rule);border-radius:3px;
color:var(--soft);font-size:11px;line-height:15px;vertical-align:1px}
.all thead .tag{display:block;margin:0 10px 0 auto;width:max-content;font-size:11px}
th button{all:unset;cursor:pointer;white-space:nowrap}
th button:hover{color:var(--ink)}
th button:focus-visible{outline:2px solid var(--A2);outline-offset:3px;border-radius:1px}
th[aria-sort]{color:var(--ink)}
th[aria-sort=ascending] button::before{content:"↑ "}
th[aria-sort=descending] button::before{content:"↓ "}
th small{display:block;color:var(--soft);font-size:13px}
th .tag{font-size:11px}
figure{margin:22px 0 34px}
figure svg{display:block;max-width:100%;height:auto}
figure img{display:block;width:100%;min-width:640px;height:auto;border-radius:4px}
figcaption{color:var(--soft);font-size:13.5px;line-height:1.5;margin-top:10px;max-width:80ch}
.figures{display:flex;flex-wrap:wrap;gap:0 48px;align-items:flex-start}
.figures figure{flex:0 1 482px;min-width:0}
.dark{display:none}
.run{margin-top:72px;padding-top:10px;border-top:3px solid var(--ink)}
.run h1{font-size:24px}
.where{color:var(--soft);font-size:13.5px;margin:0 0 4px;overflow-wrap:anywhere}
.small{margin:22px 0 4px}
.starts th,.starts td{text-align:left;padding-right:24px}
details{margin-top:14px}
summary{cursor:pointer;color:var(--soft)}
summary:focus-visible{outline:2px solid var(--A2);outline-offset:2px}
details .box{margin-top:10px}
@media (prefers-color-scheme:dark){.dark{display:block}.light{display:none}
figure img{filter:invert(1) hue-rotate(180deg)}}
@media (max-width:1140px){.set{grid-template-columns:minmax(0,1fr);gap:6px}}
@media (max-width:900px){.claim{grid-template-columns:1fr}}
@media (max-width:520px){main{padding:28px 18px 64px}h1{font-size:24px}.lead{font-size:18px}h2{margin-top:48px}
.scores th,.scores td{padding-left:6px;padding-right:6px}.scores th:first-child{padding-left:0}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:10px}}
@media print{th[aria-sort] button::before{content:""}.box{overflow:visible}.set,.claim{break-inside:avoid}}
"""

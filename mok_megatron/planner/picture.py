"""The machines as an SVG picture: NVLink domains, nodes, GPUs with their rank, EP groups in colour."""

from __future__ import annotations

from mok_megatron.planner.cluster import Placement

PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e15759", "#9c755f")
RESERVE = "#d9d9d9"
CELL, GAP, NODE_GAP, LABEL, MARGIN = 34, 2, 6, 64, 16
MAX_DOMAINS = 16
"""More domains than this would not fit a screen; the rest is mentioned below the picture."""


def rack_svg(place: Placement, *, ep: int, pp: int, title: str) -> str:
    """SVG text. A GPU's cell shows its rank; the stripe at its left the pipeline stage; grey GPUs run no rank."""
    gpu = place.cluster.gpu
    shown = min(place.cluster.domains, MAX_DOMAINS)
    # A rack is a column of trays; an HGX node is one wide row, so nodes are stacked.
    columns, rows = (shown, gpu.nodes_per_domain) if gpu.is_rack else (1, shown)
    width_of_node = gpu.node_gpus * CELL + LABEL
    width = MARGIN * 2 + columns * (width_of_node + NODE_GAP * 2)
    height = MARGIN * 2 + 44 + rows * (CELL + NODE_GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 8}" font-size="14" font-weight="bold">{_escaped(title)}</text>',
    ]
    top = MARGIN + 44
    for domain in range(shown):
        left = MARGIN + (domain * (width_of_node + NODE_GAP * 2) if gpu.is_rack else 0)
        if gpu.is_rack:
            parts.append(f'<text x="{left}" y="{top - 8}">rack {domain}</text>')
        for node in range(gpu.nodes_per_domain):
            row = node if gpu.is_rack else domain
            y = top + row * (CELL + NODE_GAP)
            name = f"tray {node}" if gpu.is_rack else f"node {domain}"
            parts.append(f'<text x="{left}" y="{y + CELL / 2 + 4:g}" fill="#555">{name}</text>')
            for slot in range(gpu.node_gpus):
                local = node * gpu.node_gpus + slot
                rank = domain * place.used + local if local < place.used else None
                parts.append(_cell(left + LABEL + slot * CELL, y, rank, ep, place.world // pp))
    foot = height - MARGIN - 10
    note = f"one colour = one EP group of {ep} consecutive ranks; stripe = pipeline stage (of {pp})"
    if place.spare_gpus:
        note += f"; grey = reserve, {place.spare_gpus} GPUs per {place.cluster.noun}"
    if shown < place.cluster.domains:
        note += f"; {place.cluster.domains - shown} more {place.cluster.noun}s alike"
    parts += [f'<text x="{MARGIN}" y="{foot}" fill="#333">{_escaped(note)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _cell(x: float, y: float, rank: int | None, ep: int, per_stage: int) -> str:
    size = CELL - GAP
    if rank is None:
        return f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="3" fill="{RESERVE}"/>'
    colour, stage = PALETTE[rank // ep % len(PALETTE)], rank // per_stage
    shade = 20 + 60 * (stage % 5) // 4
    return (
        f"<g><title>rank {rank}, EP group {rank // ep}, pipeline stage {stage}</title>"
        f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="3" fill="{colour}"/>'
        f'<rect x="{x}" y="{y}" width="5" height="{size}" fill="hsl(0,0%,{shade}%)"/>'
        f'<text x="{x + size / 2 + 2:g}" y="{y + size / 2 + 4:g}" text-anchor="middle" fill="white">{rank}</text></g>'
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

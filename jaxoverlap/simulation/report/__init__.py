"""Write a timeline as an SVG, an interactive HTML page, or a trace for Perfetto."""

from jaxoverlap.simulation.report.page import write_page
from jaxoverlap.simulation.report.perfetto import write_perfetto
from jaxoverlap.simulation.report.style import headline
from jaxoverlap.simulation.report.svg import write_svg

__all__ = ["headline", "write_page", "write_perfetto", "write_svg"]

"""OpenAI's wire format, which every program that speaks it shares: bodies in, bodies out.

Owns the names of the package. Knows nothing of transport: a batch file and a socket use it alike.
"""

from pagedjax.openai_api.requests import ApiRequest, Endpoint, parse_body
from pagedjax.openai_api.responses import error_body, failure_of, response_body

__all__ = ["ApiRequest", "Endpoint", "error_body", "failure_of", "parse_body", "response_body"]

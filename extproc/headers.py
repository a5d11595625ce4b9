"""Every header name, metadata key and metadata namespace of the product, once; newest alias first.

Names are lower case, as Envoy sends them.
"""

from __future__ import annotations

from typing import Final

# What a request says.
MODEL: Final = ("x-llmgw-model", "x-gateway-model-name", "x-ai-eg-model")
SESSION: Final = (
    "x-llmgw-session",
    "x-session-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "session-id",
    "session_id",
)
HOP: Final = "x-llmgw-hop"
RESIDENCY: Final = "x-llmgw-residency"
NO_STORE: Final = "x-llmgw-no-store"
TAGS: Final = "x-llmgw-tags"
REQUEST_ID: Final = "x-request-id"

# Set by whatever authenticates inside Envoy; a client's own copy is stripped at the edge.
CLIENT: Final = "x-llmgw-client"

# What the service tells Envoy; removed by the route, stripped at the edge.
CLUSTER: Final = "x-llmgw-cluster"
# The decision id, for Envoy's access logs. It is not removed by the route, or the log of an attempt
# would not see it: no client can send a name with a colon, and Envoy writes none upstream.
DECISION: Final = ":llmgw-decision"
DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"
MAX_RETRIES: Final = "x-envoy-max-retries"

# What the service and Envoy tell clients.
REASON: Final = "x-llmgw-reason"
RETRY_AFTER: Final = "retry-after"
RETRY_AFTER_MS: Final = "retry-after-ms"
SHOULD_RETRY: Final = "x-should-retry"

# Dynamic metadata: what Envoy read out of the body, and where a request may go.
BODY_NAMESPACE: Final = "llmgw.body"
ROUTE_NAMESPACE: Final = "llmgw.route"
PICKER_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"

# The custom tag of Envoy's access log that holds the decision id.
DECISION_TAG: Final = "decision"

# Values of `llmgw.body:model` that Envoy's filter writes when it has none.
BODY_MODEL_MISSING: Final = "_missing"
BODY_MODEL_UNREADABLE: Final = "_error"

STRIPPED_AT_THE_EDGE: Final = (CLIENT, CLUSTER, DESTINATION, SUBSET, SERVED)
REMOVED_BY_THE_ROUTE: Final = (CLUSTER, DESTINATION, SUBSET, SERVED)
CREDENTIALS: Final = ("authorization", "x-api-key", "api-key", "cookie")

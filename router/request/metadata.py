"""Keys of gRPC metadata that clients and the gateway send each other; `sla` reads their values."""

PEER = "x-slagate-peer"
"""Who a call came from: ours alone to say, so it is taken out of what clients send."""

TTFT = "x-slo-ttft-ms"
ITL = "x-slo-tpot-ms"
PRIORITY = "openengine-priority"
OBJECTIVE = "x-gateway-inference-objective"
FAIRNESS_ID = "x-gateway-inference-fairness-id"
SESSION_ID = "x-dynamo-session-id"
RECEIPT = "slagate-receipt"
RECEIPT_TRAILER = "slagate-receipt-bin"
ROUTING_KEY = "openengine-routing-key"

KNOWN = (TTFT, ITL, PRIORITY, OBJECTIVE, FAIRNESS_ID, SESSION_ID, RECEIPT, ROUTING_KEY)

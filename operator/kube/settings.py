"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

KOPF_LOGIN_SECONDS = 600.0
"""kopf logs in again after this time, so that it follows tokens that the kubelet renews with hours to go."""

TOKEN_SECONDS = 600
"""Life of a minted token: the shortest that the API server takes."""

TOKEN_REQUEST_SECONDS = 3.5
"""Deadline of a token: a poll, which waits for it, has four seconds in all."""

TOKEN_RENEWAL_SECONDS = 1.0
"""The same while there is one that is still good."""

TOKEN_RETRY_SECONDS = 10.0
"""How long a token that could not be renewed, and is still good, is used before the next try."""

TOKEN_REFUSED_SECONDS = 2.0
"""How long a failed request answers for all that want the same token, and have none: each head of a pool does."""

EVENT_REPEAT_SECONDS = 600.0
"""An event is not repeated within this time: `kubectl describe` shows events of the last hour."""

EVENT_FLUSH_SECONDS = 2.0
"""A process that ends posts its last events this long; its pod has 30 s to end in all."""

SCHEMA_CHECK_SECONDS = 300.0
"""CRDs change with an upgrade, which somebody watches for minutes."""

SCHEMA_RETRY_SECONDS = 10.0
"""How soon to look again while something is lacking, or could not be read: the operator may not be Ready until
then, and an upgrade waits for that."""

LEASE_DURATION_SECONDS = 15
"""A standby takes a Lease that was not renewed for this long; as in kube-controller-manager."""

RENEW_DEADLINE_SECONDS = 10.0
"""The holder stops writing this long after its last renewal: 5 s before a standby may begin."""

RENEW_INTERVAL_SECONDS = 2.0
"""Several renewals may fail before the deadline."""

STANDBY_POLL_SECONDS = 1.0
"""A standby looks this often, so that it takes over within 2 s of a release."""

LAYOUT_RETRY_SECONDS = 1.0
"""After one or two times this long a process looks again whether operators with another number of shards have ended."""

LEASE_REQUEST_SECONDS = 5.0
"""Deadline of one request for the Lease: a second one fits in before the renewal is overdue."""

GANG_LOOK_SECONDS = 60.0
"""How often to look which gang scheduler the cluster has: two requests, and installing one takes minutes."""

GANG_RETRY_SECONDS = 10.0
"""How soon to look again after the API server did not answer, or refused."""

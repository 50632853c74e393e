"""Serve's request router for engine replicas.

Serve's alpha `RequestRouter` interface is used for two things only: a call whose `session_id` is a replica's id goes to
that replica and to no other, and the process's Router learns of every change in the replica set.

Serve pickles this module by value: a class defined here would be another one than in the process that imports it.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.placement import Membership, ReplicaGone


class PinningRequestRouter(RequestRouter):
    """Routes a call with a session id to the replica of that id, any other call to any replica."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._members: Membership | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if pending_request.args and isinstance(pending_request.args[0], Membership):
            self._members = pending_request.args[0]
            self._publish()
        wanted = pending_request.metadata.session_id
        if not wanted:
            return [candidate_replicas]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == wanted:
                return [[replica]]
        if not pending_request.future.done():
            self._remove_pending_request_from_indices(pending_request)
            pending_request.future.set_exception(ReplicaGone(wanted))
        return [candidate_replicas]  # looked at only after the check that the future is done

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        if self._members is not None:
            here = ray.get_runtime_context().get_node_id()
            replicas = self.curr_replicas.items()
            self._members.publish({replica_id.unique_id: replica.node_id == here for replica_id, replica in replicas})

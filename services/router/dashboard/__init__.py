"""The operators' page: one live view of pools, machines, transfers and recent requests."""

from services.router.dashboard.recent import RecentRequests, RequestRecord
from services.router.dashboard.routes import DashboardSource, dashboard_routes

__all__ = ["DashboardSource", "RecentRequests", "RequestRecord", "dashboard_routes"]

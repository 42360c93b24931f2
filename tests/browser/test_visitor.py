"""What the visitor of these tests says when a page does not follow."""

from __future__ import annotations

import pytest

from tests.admin.support import Cluster
from tests.browser.visitor import WAIT_MS, Visitor
from tests.support import unique_name


def test_a_form_that_is_not_sent_is_described(visitor: Visitor, cluster: Cluster) -> None:
    topic = unique_name("described")
    cluster.add(topic, "c")
    visitor.go(f"/messages/{topic}")
    visitor.find("#publish-open").click()
    visitor.find("#publish-headers").fill("tenant: acme")
    visitor.page.set_default_navigation_timeout(100)
    try:
        with pytest.raises(AssertionError) as failed:
            visitor.act("#publish-do")
    finally:
        visitor.page.set_default_navigation_timeout(WAIT_MS)
    lines = str(failed.value).splitlines()
    assert f"address: {visitor.site}/messages/{topic}" in lines
    assert "focus: #publish-body" in lines
    assert '#publish-headers has "tenant: acme"' in lines
    assert any(line.startswith("#publish-body: ") for line in lines), "why the browser refuses the form"

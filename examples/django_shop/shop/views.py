from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from shop.models import Order

from nsparq.client.sync import Producer

producer = Producer("127.0.0.1:4150", retry=True)


def create(request: HttpRequest) -> JsonResponse:
    with transaction.atomic():
        order = Order.objects.create(item=request.POST["item"])
        # After the commit: a consumer must not look for an order that is not there yet.
        transaction.on_commit(lambda: producer.publish("orders", {"id": order.pk}))
    return JsonResponse({"id": order.pk}, status=201)


urlpatterns = [path("orders", create)]

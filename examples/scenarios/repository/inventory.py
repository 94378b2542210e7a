"""A shop's stock: how much of each item is there, and what has been ordered."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Order:
    item: str
    quantity: int
    customer: str


@dataclass
class Inventory:
    stock: dict[str, int] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)

    def add(self, item: str, quantity: int) -> None:
        self.stock[item] = self.stock.get(item, 0) + quantity

    def available(self, item: str) -> int:
        return self.stock.get(item, 0)

    def order(self, item: str, quantity: int, customer: str) -> bool:
        """Whether the order was accepted."""
        if self.available(item) < quantity:
            return False
        self.orders.append(Order(item, quantity, customer))
        return True

    def ship(self) -> list[Order]:
        """All orders that can be sent; they leave the stock."""
        shipped = []
        for order in self.orders:
            if self.stock.get(order.item, 0) >= order.quantity:
                self.stock[order.item] -= order.quantity
                shipped.append(order)
        self.orders = [order for order in self.orders if order not in shipped]
        return shipped

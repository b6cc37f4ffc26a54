import torch

from pt2mx.fx.graph.constants import constant_nodes, evaluate, first_equal, root_name
from tests.models import module_of


def graph():
    def forward(self, x):
        self.cache.add_(x)
        weight = (self.a * self.b).t().to(torch.bfloat16)
        noise = torch.rand_like(self.a)
        return x @ weight.float(), noise, self.cache * 2, self.a + x

    a, b = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    net = module_of(forward, a=a, b=b, cache=torch.nn.Buffer(torch.zeros(4, 4)))
    model = torch.export.export(net, (torch.randn(4, 4),)).module()
    return model, {n.name: n for n in model.graph.nodes}


def outputs(model):
    return next(iter(model.graph.find_nodes(op="output"))).args[0]


def test_which_nodes_are_constant():
    model, _ = graph()
    matmul, noise, cache, mixed = outputs(model)
    weight = matmul.args[1]
    constants = constant_nodes(model.graph)
    assert weight in constants
    assert matmul not in constants and mixed not in constants, "they read an input"
    assert noise not in constants, "it is random"
    assert cache not in constants, "its buffer is written"


def test_value_and_name_of_a_constant():
    model, _ = graph()
    weight = outputs(model)[0].args[1]
    with torch.no_grad():
        assert torch.equal(evaluate(model, weight), (model.a * model.b).t().to(torch.bfloat16).float())
    assert root_name(weight) == "a"


def test_which_constants_do_the_same_to_the_same_tensors():
    def forward(self, x):
        a, b = self.a, self.b
        return x @ a.t(), x @ a.t(), x @ b.t(), x @ a.transpose(0, 1), x @ (a * b).t(), x @ (b * a).t()

    net = module_of(forward, a=torch.nn.Parameter(torch.randn(4, 4)), b=torch.nn.Parameter(torch.randn(4, 4)))
    model = torch.export.export(net, (torch.randn(4, 4),)).module()
    weights = [matmul.args[1] for matmul in outputs(model)]

    def groups():
        equal = first_equal(model, constant_nodes(model.graph))
        return [weights.index(equal[weight]) for weight in weights]

    assert groups() == [0, 0, 2, 3, 4, 5]
    model.b = model.a
    assert groups() == [0, 0, 0, 3, 4, 4]

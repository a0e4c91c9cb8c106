package render

import (
	"strconv"
	"text/template/parse"
)

// rewriter turns the names in a parsed template into look-ups: {{order.no}} becomes {{find . "order" "no"}}. Where a value may be
// absent (a condition, the arguments of default) the look-up is one that reports nothing.
type rewriter struct {
	depth int
	err   error
}

func (w *rewriter) fault(n parse.Node, format string, args ...any) {
	if w.err == nil {
		w.err = faultf(format, args...)
	}
}

func (w *rewriter) list(l *parse.ListNode) {
	if l == nil {
		return
	}
	if w.depth++; w.depth > maxDepth {
		w.fault(l, "blocks are nested more than %d deep", maxDepth)
		return
	}
	defer func() { w.depth-- }()
	for _, n := range l.Nodes {
		switch n := n.(type) {
		case *parse.ActionNode:
			w.pipe(n.Pipe, false)
		case *parse.IfNode:
			if len(n.Pipe.Decl) > 0 {
				w.fault(n, "if declares no variable: declare %s before it", n.Pipe.Decl[0])
			}
			w.wrap(n.Pipe, "truth", true)
			w.list(n.List)
			w.list(n.ElseList)
		case *parse.WithNode:
			w.wrap(n.Pipe, "inside", true)
			w.list(n.List)
			w.list(n.ElseList)
		case *parse.RangeNode:
			w.wrap(n.Pipe, "each", false)
			w.list(n.List)
			w.list(n.ElseList)
		case *parse.TemplateNode:
			w.fault(n, "template is not available")
		case *parse.TextNode, *parse.CommentNode, *parse.BreakNode, *parse.ContinueNode:
		default:
			w.fault(n, "%s is not available", n)
		}
	}
}

// wrap rewrites a pipeline and hands its value to a function, together with the place.
func (w *rewriter) wrap(p *parse.PipeNode, function string, optional bool) {
	inner := &parse.PipeNode{NodeType: parse.NodePipe, Pos: p.Pos, Cmds: p.Cmds}
	w.commands(inner, optional)
	p.Cmds = []*parse.CommandNode{call(function, dot(), inner)}
}

// pipe rewrites a pipeline. A variable that it declares holds a place, so that names can be looked up in it.
func (w *rewriter) pipe(p *parse.PipeNode, optional bool) {
	if len(p.Decl) > 0 {
		w.wrap(p, "place", optional)
		return
	}
	w.commands(p, optional)
}

func (w *rewriter) commands(p *parse.PipeNode, optional bool) {
	if w.depth++; w.depth > maxDepth {
		w.fault(p, "parentheses are nested more than %d deep", maxDepth)
		return
	}
	defer func() { w.depth-- }()
	for _, c := range p.Cmds[min(1, len(p.Cmds)):] {
		if name, ok := c.Args[0].(*parse.IdentifierNode); ok && lenient[name.Ident] {
			optional = true // {{nick | default "friend"}}
		}
	}
	for i, c := range p.Cmds {
		w.command(c, i == 0, optional)
	}
}

func (w *rewriter) command(c *parse.CommandNode, first, optional bool) {
	name, ok := c.Args[0].(*parse.IdentifierNode)
	if !ok || (first && len(c.Args) == 1) { // a value
		if len(c.Args) > 1 || !first {
			w.fault(c, "%s is no function", c.Args[0])
			return
		}
		c.Args[0] = w.value(c.Args[0], optional)
		if v, ok := c.Args[0].(*parse.PipeNode); ok && len(v.Cmds) == 1 { // no need for parentheses around a call
			c.Args = v.Cmds[0].Args
		}
		return
	}
	if _, ok := available[name.Ident]; !ok {
		w.fault(c, "there is no function %q; there are %s", name.Ident, functionNames)
		return
	}
	for i := 1; i < len(c.Args); i++ {
		c.Args[i] = w.value(c.Args[i], optional || lenient[name.Ident])
	}
	c.Args[0] = parse.NewIdentifier(name.Ident).SetPos(name.Pos)
	c.Args = append(c.Args[:1], append([]parse.Node{dot()}, c.Args[1:]...)...) // every function knows the run by its place
}

// value rewrites an operand.
func (w *rewriter) value(n parse.Node, optional bool) parse.Node {
	look, bare := "get", "find"
	if optional {
		look, bare = "opt", "findOpt"
	}
	switch n := n.(type) {
	case *parse.IdentifierNode:
		return paren(call(bare, dot(), texts(n.Ident)...))
	case *parse.FieldNode:
		return paren(call(look, dot(), texts(n.Ident...)...))
	case *parse.DotNode:
		return paren(call(look, dot()))
	case *parse.VariableNode:
		return paren(call(look, variable(n.Ident[0]), texts(n.Ident[1:]...)...))
	case *parse.ChainNode:
		if root, ok := n.Node.(*parse.IdentifierNode); ok {
			return paren(call(bare, dot(), texts(append([]string{root.Ident}, n.Field...)...)...))
		}
		inner := w.value(n.Node, optional)
		return paren(call(look, paren(call("place", dot(), inner)), texts(n.Field...)...))
	case *parse.PipeNode:
		if len(n.Decl) > 0 {
			w.fault(n, "a variable cannot be declared here")
			return n
		}
		w.commands(n, optional)
		return n
	case *parse.StringNode, *parse.NumberNode, *parse.BoolNode:
		return n
	}
	w.fault(n, "%s is not available", n)
	return n
}

func call(function string, first parse.Node, more ...parse.Node) *parse.CommandNode {
	return &parse.CommandNode{NodeType: parse.NodeCommand, Args: append([]parse.Node{parse.NewIdentifier(function), first}, more...)}
}

func paren(c *parse.CommandNode) *parse.PipeNode {
	return &parse.PipeNode{NodeType: parse.NodePipe, Cmds: []*parse.CommandNode{c}}
}

func dot() parse.Node { return &parse.DotNode{NodeType: parse.NodeDot} }

func variable(name string) parse.Node {
	return &parse.VariableNode{NodeType: parse.NodeVariable, Ident: []string{name}}
}

func texts(names ...string) (nodes []parse.Node) {
	for _, name := range names {
		nodes = append(nodes, &parse.StringNode{NodeType: parse.NodeString, Quoted: strconv.Quote(name), Text: name})
	}
	return nodes
}

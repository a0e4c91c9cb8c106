package store_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/pingcap/tidb/pkg/parser"
	_ "github.com/pingcap/tidb/pkg/parser/test_driver"
)

// statements collects one text of every named statement that the tests send. When the tests have passed, each must parse
// with a MySQL 8 grammar (the tests' own server is MariaDB), and each name in the source must have been seen.
var statements = &collector{seen: map[string]string{}}

type collector struct {
	mu   sync.Mutex
	seen map[string]string
}

var statementName = regexp.MustCompile(`/\* tidings:([a-z-]+) \*/`)

func (c *collector) add(statement string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range statementName.FindAllStringSubmatch(statement, -1) {
		if _, ok := c.seen[name[1]]; !ok {
			c.seen[name[1]] = statement
		}
	}
}

func (c *collector) check() (code int) {
	names, err := namesInSource()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	for name := range names {
		statement, ok := c.seen[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "no test sends the statement %q\n", name)
			code = 1
			continue
		}
		if err := parsesAsMySQL(statement); err != nil {
			fmt.Fprintf(os.Stderr, "the statement %q is not MySQL 8: %v\n%s\n", name, err, statement)
			code = 1
		}
	}
	return code
}

func namesInSource() (map[string]bool, error) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, m := range statementName.FindAllStringSubmatch(string(text), -1) {
			names[m[1]] = true
		}
	}
	return names, nil
}

func parsesAsMySQL(statement string) error {
	_, _, err := parser.New().Parse(statement, "utf8mb4", "utf8mb4_bin")
	return err
}

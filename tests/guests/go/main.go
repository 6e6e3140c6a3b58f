// A plugin in Go, by the standard toolchain: `pilothouse build tests/guests/go`. It answers with a ConfigMap of what it can see of
// the world outside, which has to be nothing. There is no SDK for Go yet; abi.go does what one would.
package main

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

func main() {}

const description = `{
	"parent": {"apiVersion": "t.example/v1", "kind": "Widget"},
	"children": [{"apiVersion": "v1", "kind": "ConfigMap"}]
}`

// Widget is the part of the parent that it reads.
type Widget struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		// What it does before it answers.
		Do string `json:"do"`
	} `json:"spec"`
}

func reconcile(parent string, children []string) (Desired, error) {
	var widget Widget
	if err := json.Unmarshal([]byte(parent), &widget); err != nil {
		return Desired{}, err
	}
	switch do := widget.Spec.Do; do {
	case "sleep":
		time.Sleep(time.Hour)
	case "panic":
		panic("as it was told")
	case "exit":
		os.Exit(3)
	case "grow":
		for held := [][]byte{}; ; {
			held = append(held, make([]byte, 1<<20))
		}
	case "print":
		for line := range 100_000 {
			fmt.Println("line", line, strings.Repeat("x", 100))
		}
	case "fail":
		return Desired{}, fmt.Errorf("as it was told")
	case "":
	default:
		return Desired{}, fmt.Errorf("spec.do is %q", do)
	}
	secret := make([]byte, 8)
	if _, err := rand.Read(secret); err != nil {
		return Desired{}, err
	}
	_, file := os.ReadFile("/etc/hostname")
	_, folder := os.ReadDir("/")
	child, err := json.Marshal(map[string]any{
		"apiVersion": "v1",
		"kind":       "ConfigMap",
		"metadata":   map[string]any{"name": widget.Metadata.Name},
		"data": map[string]string{
			"now":         time.Now().UTC().Format(time.RFC3339),
			"arguments":   fmt.Sprint(len(os.Args)),
			"environment": fmt.Sprint(len(os.Environ())),
			"file":        fmt.Sprint(file),
			"folder":      fmt.Sprint(folder),
			"children":    fmt.Sprint(len(children)),
		},
	})
	fmt.Println("reconciled", widget.Metadata.Name)
	return Desired{Children: []string{string(child)}}, err
}

// MyApp as a webhook of Metacontroller: from a parent and its children to the children and the status that it should have. It is what
// plugins/myapp computes, and all of its config. It also measures itself, as its caller on the same machine would find it.
//
//	webhook serve                      serve on a free port of 127.0.0.1, whose URL is the first line on stdout
//	webhook measure URL SECONDS        send stdin again and again over one connection; prints microseconds of each call, one a line
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"os"
	"sort"
	"strconv"
	"time"
)

type object = map[string]any

type myApp struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Image    string            `json:"image"`
		Replicas *int32            `json:"replicas"`
		Config   map[string]string `json:"config"`
	} `json:"spec"`
}

type deployment struct {
	Spec struct {
		Replicas int32 `json:"replicas"`
	} `json:"spec"`
	Status struct {
		AvailableReplicas int32 `json:"availableReplicas"`
	} `json:"status"`
}

type request struct {
	Parent     myApp                            `json:"parent"`
	Children   map[string]map[string]deployment `json:"children"`
	Finalizing bool                             `json:"finalizing"`
}

type response struct {
	Status    object   `json:"status,omitempty"`
	Children  []object `json:"children"`
	Finalized bool     `json:"finalized,omitempty"`
}

func sync(asked request) response {
	app := asked.Parent
	if asked.Finalizing {
		return response{Children: []object{}, Finalized: true}
	}
	labels := object{"app.kubernetes.io/name": "myapp", "app.kubernetes.io/instance": app.Metadata.Name}
	container := object{"name": "myapp", "image": app.Spec.Image}
	podMetadata, podSpec := object{"labels": labels}, object{"containers": []object{container}}
	var children []object
	if app.Spec.Config != nil {
		name := app.Metadata.Name + "-config"
		children = append(children, object{
			"apiVersion": "v1", "kind": "ConfigMap",
			"metadata": object{"name": name, "labels": labels},
			"data":     app.Spec.Config,
		})
		podMetadata["annotations"] = object{"mygroup.example.com/config-hash": hash(app.Spec.Config)}
		podSpec["volumes"] = []object{{"name": "config", "configMap": object{"name": name}}}
		container["volumeMounts"] = []object{{"name": "config", "mountPath": "/etc/myapp", "readOnly": true}}
	}
	spec := object{
		"selector": object{"matchLabels": labels},
		"template": object{"metadata": podMetadata, "spec": podSpec},
	}
	if app.Spec.Replicas != nil {
		spec["replicas"] = *app.Spec.Replicas
	}
	children = append(children, object{
		"apiVersion": "apps/v1", "kind": "Deployment",
		"metadata": object{"name": app.Metadata.Name, "labels": labels},
		"spec":     spec,
	})
	found, ok := asked.Children["Deployment.apps/v1"][app.Metadata.Name]
	return response{Children: children, Status: status(app, found, ok)}
}

func status(app myApp, found deployment, ok bool) object {
	condition := object{"type": "Available", "status": "False"}
	have, want := found.Status.AvailableReplicas, found.Spec.Replicas
	if app.Spec.Replicas != nil {
		want = *app.Spec.Replicas
	}
	condition["message"] = fmt.Sprintf("%d of %d replicas are available", have, want)
	switch {
	case !ok:
		condition["reason"], condition["message"] = "DeploymentMissing", "the Deployment does not exist yet"
	case have >= want:
		condition["status"], condition["reason"] = "True", "ReplicasAvailable"
	default:
		condition["reason"] = "ReplicasUnavailable"
	}
	return object{"availableReplicas": have, "conditions": []object{condition}}
}

func hash(config map[string]string) string {
	keys := make([]string, 0, len(config))
	for key := range config {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	sum := fnv.New64a()
	for _, key := range keys {
		for _, text := range []string{key, config[key]} {
			io.WriteString(sum, text)
			sum.Write([]byte{0})
		}
	}
	return fmt.Sprintf("%016x", sum.Sum64())
}

func answer(writer http.ResponseWriter, httpRequest *http.Request) {
	var asked request
	if err := json.NewDecoder(httpRequest.Body).Decode(&asked); err != nil {
		http.Error(writer, err.Error(), http.StatusBadRequest)
		return
	}
	writer.Header().Set("Content-Type", "application/json")
	json.NewEncoder(writer).Encode(sync(asked))
}

func serve() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Printf("http://%s/\n", listener.Addr())
	return http.Serve(listener, http.HandlerFunc(answer))
}

func measure(url string, seconds float64) error {
	body, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	call := func() error {
		response, err := http.Post(url, "application/json", bytes.NewReader(body))
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("the webhook answered %s", response.Status)
		}
		// Read to its end, or the connection is not used again.
		_, err = io.Copy(io.Discard, response.Body)
		return err
	}
	for range 50 {
		if err := call(); err != nil {
			return err
		}
	}
	for end := time.Now().Add(time.Duration(seconds * float64(time.Second))); time.Now().Before(end); {
		start := time.Now()
		if err := call(); err != nil {
			return err
		}
		fmt.Println(float64(time.Since(start).Nanoseconds()) / 1000)
	}
	return nil
}

func run(arguments []string) error {
	switch {
	case len(arguments) == 1 && arguments[0] == "serve":
		return serve()
	case len(arguments) == 3 && arguments[0] == "measure":
		seconds, err := strconv.ParseFloat(arguments[2], 64)
		if err != nil {
			return err
		}
		return measure(arguments[1], seconds)
	}
	return fmt.Errorf("usage: webhook serve | webhook measure URL SECONDS")
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

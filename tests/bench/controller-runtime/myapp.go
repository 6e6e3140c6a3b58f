// The type MyApp, and the copies that kubebuilder would generate.
package main

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

type MyAppSpec struct {
	Image    string `json:"image"`
	Replicas *int32 `json:"replicas,omitempty"`
}

type MyAppStatus struct {
	// A pointer, so that 0 is written, too.
	AvailableReplicas  *int32             `json:"availableReplicas,omitempty"`
	ObservedGeneration int64              `json:"observedGeneration,omitempty"`
	Conditions         []metav1.Condition `json:"conditions,omitempty"`
}

type MyApp struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   MyAppSpec   `json:"spec"`
	Status MyAppStatus `json:"status,omitempty"`
}

type MyAppList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []MyApp `json:"items"`
}

func addToScheme(scheme *runtime.Scheme) {
	version := schema.GroupVersion{Group: "mygroup.example.com", Version: "v1"}
	scheme.AddKnownTypes(version, &MyApp{}, &MyAppList{})
	metav1.AddToGroupVersion(scheme, version)
}

func copied[T any](value *T) *T {
	if value == nil {
		return nil
	}
	copy := *value
	return &copy
}

func (in *MyApp) DeepCopy() *MyApp {
	out := &MyApp{TypeMeta: in.TypeMeta, Spec: in.Spec, Status: in.Status}
	in.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	out.Spec.Replicas = copied(in.Spec.Replicas)
	out.Status.AvailableReplicas = copied(in.Status.AvailableReplicas)
	out.Status.Conditions = append([]metav1.Condition(nil), in.Status.Conditions...)
	return out
}

func (in *MyApp) DeepCopyObject() runtime.Object { return in.DeepCopy() }

func (in *MyAppList) DeepCopyObject() runtime.Object {
	out := &MyAppList{TypeMeta: in.TypeMeta}
	in.ListMeta.DeepCopyInto(&out.ListMeta)
	for i := range in.Items {
		out.Items = append(out.Items, *in.Items[i].DeepCopy())
	}
	return out
}

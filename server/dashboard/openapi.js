// The description of the API by Swagger UI, with requests to this server alone.
SwaggerUIBundle({ url: "../openapi.json", dom_id: "#operations", docExpansion: "list", defaultModelsExpandDepth: 0 });
